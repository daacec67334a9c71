"""The report's parts: inputs and what is wrong with them, marks, plots, every section's figures, the whole page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from host import ledger, traces
from host.model_file import ModelFile
from host.report import __main__ as command
from host.report import inputs as inputs_module
from host.report import page, plots, top
from host.report.inputs import KINDS, NOT_COMMITTED, UNKNOWN, UPSTREAM, Input, Inputs
from host.report.page import MARKS, Section, esc, kind, tag
from host.report.sections import (
    NAMES,
    accuracy,
    agents,
    bytes_by_batch,
    capacity,
    glossary,
    routing,
    scorecard,
    timing,
)
from host.report.sections import ledger as ledger_section
from models import synthetic

ROOT = Path(__file__).parents[2]
SECTIONS = {name: command._section(name) for name in NAMES}
USERS = {
    "accuracy": {"accuracy"},
    "agents": {"agents"},
    "capacity": {"capacity"},
    "hls4ml": {"accuracy"},
    "host_layer": {"timing"},
    "layer_cycles": {"timing"},
    "pipeline": {"pipeline"},
    "routing": {"bytes_by_batch"},
    "storage": {"timing"},
    "suite": {"accuracy", "bytes_by_batch"},
    "sweep": {"timing"},
    "token": {"timing"},
    "traces": {"bytes_by_batch", "routing"},
    "unions": {"bytes_by_batch"},
}
"""Sections that say so where a result is not there; the ledger always does."""


@pytest.fixture
def root(tmp_path) -> Path:
    """What the report reads, in a folder that no git knows."""
    for folder in ("sim/results", "boards/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "models").mkdir()
    for name in ("tiny-moe-q6k.gguf", "tiny-moe-suite.json"):
        shutil.copy(ROOT / "models" / name, tmp_path / "models")
    (tmp_path / UPSTREAM).parent.mkdir(parents=True)
    shutil.copy(ROOT / UPSTREAM, tmp_path / UPSTREAM)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Pictures as their words alone: drawing is tested with the whole page."""
    monkeypatch.setattr(
        plots,
        "picture",
        lambda name, title, description, draw, height=(1, 1): page.Html(esc(f"{title}: {description}")),
    )


def change(root: Path, name: str, edit) -> None:
    """Edit a result's JSON in place."""
    path = root / "sim" / "results" / f"{name}.json"
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def git(root: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(
        ["git", "-C", str(root), *identity, *words], check=True, capture_output=True, text=True
    ).stdout


# Inputs.


def test_every_committed_result_is_whole():
    """All that is committed can be read; only what no command has recorded yet may be absent."""
    for each in Inputs().every():
        assert each.problem is None or "not there" in each.problem


def test_every_kind_is_listed_even_if_nobody_expects_it(root):
    (root / "sim" / "results" / "new.json").write_text("{}")
    paths = [each.path for each in Inputs(root).every()]
    assert {f"sim/results/{name}.json" for name in (*KINDS, "new")} <= set(paths)
    assert len(paths) == len(set(paths))


def test_without_git_dates_are_the_files_own_and_commits_unknown(root):
    found = Inputs(root).get("token")
    assert (found.problem, found.commit) == (None, UNKNOWN)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert Inputs(root).head() == UNKNOWN


def test_dates_and_commits_are_gits(root):
    git(root, "init", "-q")
    git(root, "add", "sim/results/token.json")
    git(root, "commit", "-q", "-m", "x", "--date", "2020-02-03T12:00:00")
    commit = git(root, "rev-parse", "--short", "HEAD").strip()
    inputs = Inputs(root)
    assert inputs.get("token").commit == inputs.head() == commit
    assert inputs.get("suite").commit == NOT_COMMITTED  # no commit has it
    assert not inputs.clean
    change(root, "token", lambda data: data.update(cycles=1))
    assert Inputs(root).get("token").commit == NOT_COMMITTED


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "not there; `make sim-token RECORD=1` writes it"),
        ("{", "not JSON"),
        ("[]", "has no key 'bit_exact'"),
        ("{}", "has no key"),
    ],
)
def test_problems_have_names(root, content, said):
    path = root / "sim" / "results" / "token.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    found = Inputs(root).get("token")
    assert found.data is None
    assert found.problem is not None
    assert found.problem.startswith("sim/results/token.json: ")
    assert said in found.problem
    with pytest.raises(inputs_module.InputError, match=re.escape(found.problem)):
        Inputs(root).need("token")


def test_a_nested_key_is_looked_for(root):
    change(root, "faults", lambda data: data["total"].pop("wrong"))
    assert "has no key 'total.wrong'" in (Inputs(root).get("faults").problem or "")


def test_a_folder_in_place_of_a_file(root):
    path = root / "sim" / "results" / "token.json"
    path.unlink()
    path.mkdir()
    assert "cannot read" in (Inputs(root).get("token").problem or "")


def test_fresh_results_take_the_place_of_committed_ones(root):
    (root / "build" / "sim").mkdir(parents=True)
    shutil.copy(root / "sim" / "results" / "token.json", root / "build" / "sim")
    found = Inputs(root, fresh=True).get("token")
    assert (found.path, found.fresh, found.commit) == ("build/sim/token.json", True, NOT_COMMITTED)
    assert not Inputs(root).get("token").fresh
    section = ledger_section.section(Inputs(root, fresh=True))
    assert "<b>fresh</b>" in section.body.split("build/sim/token.json")[1][:80]


# The page.


def test_marks():
    assert [kind(text) for text in ("counted: by x", "measured", "counted by the engine", "a board, routed: by t")] == [
        "counted",
        "measured",
        "counted",
        "routed",
    ]
    with pytest.raises(ValueError, match="says none of measured"):
        kind("found somewhere")
    for word in MARKS:
        assert f'class="tag {word}"' in tag(word)
        assert f"</span> {word}</span>" in tag(word)  # a word, not a colour alone
    assert "&lt;b&gt;" in tag("derived: <b>")


def test_what_is_shown_is_escaped():
    made = Section("x", "<t>", "<q>", "<a>", "", {"<d>": [{"a": "</script><b>"}]}, ["<m>"])
    html = page.render([made], "", "")
    for text in ("<t>", "<q>", "<a>", "<m>", "</script><b>"):
        assert text not in html


def test_a_table_scrolls_by_itself():
    html = page.table("c", ["a", "b"], [["x", "1"]])
    assert '<div class="scroll" role="region" tabindex="0" aria-label="c">' in html
    assert '<th scope="row">x</th><td class="n">1</td>' in html


def test_the_page_is_whole_and_alone(made):
    """Ids are unique, links lead somewhere, nothing is fetched, no colour of the drawing is left over."""
    html = made.read_text()
    ids = re.findall(r'\sid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for link in re.findall(r'href="#([^"]*)"', html):
        assert link in ids
    assert not re.findall(r'(?:src|href)="(?!#|data:)', html)
    assert "@import" not in html
    assert not re.findall(r"url\((?!#)", html)
    for sentinel, _ in plots.COLOURS.values():
        assert sentinel not in html
    assert not re.findall(r"<!-- (?:style|script|links|top|sections|data|made) -->", html)
    assert str(ROOT) not in html
    assert str(Path.home()) + "/" not in html or Path.home() == Path("/")


def test_every_word_has_an_entry(made):
    for word in set(re.findall(r'href="#term-([^"]*)"', made.read_text())):
        assert word in glossary.TERMS


def test_pictures_are_files_too(made):
    names = re.findall(r'id="plot-([^"]+)"', made.read_text())
    assert len(names) > 8
    for name in names:
        assert (made.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_is_the_same_when_made_again(made, tmp_path):
    assert command.main(["--out", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").read_text() == made.read_text()


def test_a_section_that_fails_is_shown_and_told(monkeypatch, quick, tmp_path, capsys):
    def fail(inputs):
        raise KeyError("a <key>")

    monkeypatch.setattr(routing, "section", fail)
    assert command.main(["--out", str(tmp_path)]) == 1
    assert "make report: error: section routing: KeyError: 'a <key>'" in capsys.readouterr().err
    html = (tmp_path / "index.html").read_text()
    assert "KeyError: &#x27;a &lt;key&gt;&#x27;" in html
    assert 'id="capacity"' in html


def test_progress_from_the_first_second(quick, tmp_path, capsys):
    command.main(["--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[  0.")
    for name in NAMES:
        assert any(line.endswith(f"section {name}") for line in lines)


def test_sections_say_what_they_are_from(made):
    """With day and commit, as the ledger has them."""
    inputs = Inputs()
    for name, results in {"accuracy": ("accuracy", "suite"), "pipeline": ("pipeline",), "routing": ("traces",)}.items():
        shown = made.read_text().split(f'<section id="{name}"')[1].split("</section>")[0].split('class="sources">')[1]
        for result in results:
            found = inputs.get(result)
            assert re.search(rf"{found.path}[^;]*\({found.date}, {found.commit}\)", shown)


def luminance(colour: str) -> float:
    """Of a colour as #rrggbb, by WCAG 2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_from_the_paper(scheme):
    """Text and lines have at least 4.5 : 1 (WCAG AA), in both schemes."""
    css = (page.STATIC / "page.css").read_text()
    block = css.split(":root {")[1] if scheme == "light" else css.split(':root[data-theme="dark"] {')[1]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block.split("}")[0]))
    for name in ("ink", "soft", "a", "b", "c", "d", "e", "warn", "good", "bad"):
        light, dark = sorted((luminance(colours[name]), luminance(colours["paper"])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, name


# Inputs that are not as they should be.


@pytest.mark.parametrize("name", sorted(USERS))
@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_bad_input_is_named_where_it_is_missed(root, quick, name, content):
    path = root / "sim" / "results" / f"{name}.json"
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    inputs = Inputs(root)
    problem = inputs.get(name).problem
    assert problem is not None
    for user in sorted(USERS[name]):
        assert problem in SECTIONS[user](inputs).missing, user
    listed = SECTIONS["ledger"](inputs)
    assert problem in listed.missing
    assert f"sim/results/{name}.json" in listed.body
    html = page.render([listed], top.first_screen(inputs, [listed]), "")
    assert esc(problem) in html


def test_a_bad_board_is_named(root, quick):
    (root / "boards" / "results" / "ulx3s_25f.json").write_text("{}")
    inputs = Inputs(root)
    assert any("ulx3s_25f.json: has no key 'board'" in each for each in SECTIONS["ledger"](inputs).missing)
    assert any("ulx3s_25f" in each for each in SECTIONS["roofline"](inputs).missing)


def test_without_anything_the_page_still_says_so(tmp_path, quick):
    """Not even upstream's figures: every section is there, broken or not, and every input is named."""
    inputs = Inputs(tmp_path)
    found, _, _ = command.build(inputs, None)
    html = page.render(found, top.first_screen(inputs, found), command.made(inputs))
    assert [section.id for section in found if f'<section id="{section.id}"' in html] == [
        section.id for section in found
    ]
    for name in KINDS:
        assert f"sim/results/{name}.json: not there" in html


# The sections' figures.


@pytest.mark.parametrize("name", NAMES)
def test_each_section_from_what_is_committed(sections, name):
    section = sections[{"ledger": "ledger"}.get(name, name)]
    absent = {each.problem for each in Inputs().every() if each.problem}
    assert set(section.missing) <= absent
    assert section.title
    assert section.question.endswith("?")
    assert section.answer
    assert json.loads(json.dumps(section.data)) == section.data
    assert all(section.data.values())
    assert "nan" not in re.sub(r"<[^>]*>", " ", section.answer).lower().split()


@pytest.mark.parametrize("name", list(synthetic.SHAPES))
def test_bytes_of_all_but_the_experts(name):
    """Against the tensors that a file of that shape has, their matrices as Q6_K and the real vocabulary."""
    shape = synthetic.SHAPES[name]
    total = 0
    for tensor in synthetic.tensors(shape, shape.layers):
        if "_exps" in tensor.name:
            continue
        size = [capacity.VOCABULARY[name] if each == synthetic.VOCABULARY else each for each in tensor.shape]
        weights = int(np.prod(size))
        total += weights * 4 if tensor.type == synthetic.F32 else weights // 256 * 210
    assert capacity.sizes(name)["others"] == total


def test_granite_by_hand():
    """Its published file: 108,307,776 B beside the experts, 49,152 B of KV a token; the walls of docs/capacity.md."""
    size = capacity.sizes("granite-1b", 1_099_212_096)
    assert (size["experts"], size["others"], size["kv_token"]) == (990_904_320, 108_307_776, 49_152)
    assert capacity.floors(size, 1000)["resident"] == 1_099_212_096 + 49_152_000
    assert capacity.longest(size, 10**9, "resident") == -1
    assert capacity.longest(size, 1_099_212_096 + 49_152 * 7 + 1, "resident") == 7
    assert "22,364 tokens" in capacity.section(Inputs()).answer


def test_floors_are_those_of_the_command():
    """``emufpga ledger`` of the tiny model: the same input path, KV cache and sums."""
    with ModelFile.open(str(ROOT / "models" / "tiny-moe-q6k.gguf")) as model:
        report = ledger.ledger(model, [2048], "f16")
        matrix = model.layers[0].gate.expert_stride
    assert report["bytes"]["input"] == ledger.input_bytes(matrix)
    size = {"file": report["bytes"]["file"], "others": report["bytes"]["others"], "half_cache": 0}
    size |= {"kv_token": report["bytes"]["kv_token"], "input": ledger.input_bytes(matrix)["pcie"]}
    assert capacity.floors(size, 2048)["serial"] == report["contexts"][0]["serial"]
    assert capacity.floors(size, 2048)["resident"] == report["contexts"][0]["resident"]


def test_bytes_by_hand():
    """Two of four experts of 100 B, union 3 at batch 2."""
    union = bytes_by_batch.Union(2, 3.0, 2, 4, 5)
    source = bytes_by_batch.Source("m", 4, 2, 100.0, "counted", "counted: a test", (union,))
    (row,) = bytes_by_batch.rows(source)
    assert (row["bytes_all"], row["bytes_union"], row["bytes_independent"]) == (200, 150, 150)
    assert (row["useful_share_all"], row["union_independent"]) == (0.75, 3.0)


def test_routing_by_hand():
    """Two layers of ten experts: all choices on one, and one each."""
    trace = {"model": "m", "layers": 2, "experts": 10, "experts_used": 1, "tokens": 10, "reuse": [1.0, None]}
    found = routing.statistics(trace | {"counts": [[10] + [0] * 9, [1] * 10]})
    assert (found["top_tenth_share"], found["top_tenth_least"], found["top_tenth_most"]) == pytest.approx(
        (0.55, 0.1, 1.0)
    )
    assert (found["never_chosen"], found["reuse"]) == (0.45, 1.0)
    assert routing.lorenz(np.array([[10.0, 0], [5, 5]])).tolist() == [0, 0.75, 1]


def trace_file(path: Path, rows: list[tuple[int, int, int, int, int]]) -> Path:
    head = "# route_trace v1\n# model=m.gguf n_expert=4 n_expert_used=2\n"
    head += "# layer=0 expert_bytes=10\n# layer=1 expert_bytes=30\n"
    path.write_text(head + "turn,phase,step,layer,expert\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_counts_of_a_trace_by_hand(tmp_path, capsys, monkeypatch):
    """Three decoded tokens of two turns; a prompt's are not counted, nor is reuse across turns."""
    layer0 = [
        (0, 0, 0, 0, 3),
        (0, 1, 1, 0, 0),
        (0, 1, 1, 0, 1),
        (0, 1, 2, 0, 1),
        (0, 1, 2, 0, 2),
        (1, 1, 1, 0, 1),
        (1, 1, 1, 0, 2),
    ]
    layer1 = [(0, 1, 1, 1, 0), (0, 1, 1, 1, 1), (0, 1, 2, 1, 2), (0, 1, 2, 1, 3), (1, 1, 1, 1, 0), (1, 1, 1, 1, 1)]
    path = trace_file(tmp_path / "a.csv", layer0 + layer1)
    found = traces.count(path)
    assert found["counts"] == [[1, 3, 2, 0], [2, 2, 1, 1]]
    assert found["reuse"] == [0.5, 0.0]
    assert (found["tokens"], found["layers"], found["expert_bytes"], found["model"]) == (3, 2, 20, "m")
    monkeypatch.setattr(traces, "RECORDED", tmp_path / "traces.json")
    assert traces.main([str(path), "--record"]) == 0
    report = json.loads((tmp_path / "traces.json").read_text())
    assert report["traces"] == [found]
    assert traces.main([str(trace_file(tmp_path / "b.csv", layer0[:1]))]) == 1
    assert "no decoded tokens" in capsys.readouterr().err


def test_recorded_counts_add_up():
    """Every token chose k experts in every layer; reuse is what the cache replay counted on its own."""
    cache = {trace["model"]: trace["reuse"] for trace in Inputs().need("cache")["traces"]}
    for trace in Inputs().need("traces")["traces"]:
        assert {sum(layer) for layer in trace["counts"]} == {trace["tokens"] * trace["experts_used"]}
        assert np.mean(trace["reuse"]) == pytest.approx(cache[trace["model"]], abs=1e-6)


def test_timing_has_the_medians(sections):
    rows = sections["timing"].data["storage"]
    storage = Inputs().need("storage")
    for mode in storage["modes"]:
        for what, speed in mode["speeds"].items():
            (row,) = [each for each in rows if (each["mode"], each["what"]) == (mode["mode"], what)]
            assert {key: row[key] for key in ("median", "min", "max", "n")} == {
                key: speed[key] for key in ("median", "min", "max", "n")
            }
    one = timing._row(sections["timing"].data["storage_by_batch"], "direct", 1, "all experts")
    speed = storage["modes"][2]["speeds"]["framing_ahead"]
    assert one["seconds"] == pytest.approx(41_287_680 / 1e9 / speed["median"])
    assert one["seconds_max"] == pytest.approx(41_287_680 / 1e9 / speed["min"])


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12345, "12,300"), (0.04261, "0.0426"), (1.5, "1.5"), (99.96, "100"), (3, "3")]
)
def test_numbers_have_three_digits(value, text):
    assert agents.number(value) == text


def test_agents_never_divides_the_clocks(sections):
    assert "never divided" in sections["agents"].body
    clocks = {(row["placement"], row["clock"]) for row in sections["agents"].data["suite"]}
    assert {clock for placement, clock in clocks if placement.startswith(("resident", "llama"))} == {"wall"}
    assert {clock for placement, clock in clocks if placement in ("tape", "selected", "cache")} == {"modelled"}


def test_accuracy_by_hand(root, quick):
    change(root, "accuracy", lambda data: data.update(errors={"normal": {"int16_blocks": 1e-5, "q8_k": 5e-3}}))
    section = accuracy.section(Inputs(root))
    assert section.data["products"][0]["ratio"] == pytest.approx(500)
    assert "500 to 500 times less" in section.answer


# The claims: each rule is seen to fail.


def verdict(root: Path, name: str) -> str:
    return next(scorecard.judge(claim, Inputs(root)).verdict for claim in scorecard.CLAIMS if claim.id == name)


BREAKS = [
    ("bits", "token", lambda data: data.update(bit_exact=False), scorecard.FAILURE),
    ("bits", "suite", lambda data: data.update(same_logit_bits=False), scorecard.FAILURE),
    ("netlist", "netlist", lambda data: data.update(equal=False), scorecard.FAILURE),
    ("faults", "faults", lambda data: data["total"].update(wrong=1), scorecard.FAILURE),
    ("faults", "faults", lambda data: data["total"].update(hung=1), scorecard.MIXED),
    ("selected", "token", lambda data: data.update(cycles_per_block=16.26), scorecard.MIXED),
    ("selected", "token", lambda data: data.update(cycles_per_block=62), scorecard.FAILURE),
    ("drained", "layer_cycles", lambda data: data["rows"][4].update(cycles=792_128 + 147_456 * 15), scorecard.MIXED),
    ("drained", "layer_cycles", lambda data: data["rows"][4].update(cycles=792_128 + 147_456 * 47), scorecard.FAILURE),
    (
        "answers",
        "agents",
        lambda data: data["workloads"]["suite"]["rows"][0]["right"].update(value=44),
        scorecard.MIXED,
    ),
    (
        "answers",
        "agents",
        lambda data: data["workloads"]["suite"]["rows"][0]["right"].update(value=9),
        scorecard.FAILURE,
    ),
    ("accuracy", "accuracy", lambda data: data["errors"]["normal"].update(q8_k=1e-4), scorecard.MIXED),
    ("accuracy", "accuracy", lambda data: data["errors"]["normal"].update(q8_k=1e-9), scorecard.FAILURE),
    ("memory", "capacity", lambda data: data["rows"]["llama.cpp, read"]["memory"].update(peak=1), scorecard.MIXED),
    ("memory", "capacity", lambda data: data["rows"]["resident"]["memory"].update(peak=1), scorecard.FAILURE),
    ("sharing", "routing", lambda data: data["traces"][0]["rows"][3].update(mean=127.9), scorecard.MIXED),
    ("feed", "storage", lambda data: data.update(goal=0.99), scorecard.FAILURE),
    ("feed", "storage", lambda data: data["modes"][0]["share_of_ceiling"]["feed"].update(median=0.5), scorecard.MIXED),
]


@pytest.mark.parametrize(("claim", "name", "edit", "want"), BREAKS)
def test_a_broken_claim_is_not_a_success(root, claim, name, edit, want):
    assert verdict(root, claim) == scorecard.SUCCESS
    change(root, name, edit)
    assert verdict(root, claim) == want


def test_read_ahead_is_judged_by_its_range(root):
    def gains(least: float, middle: float):
        def edit(data):
            for mode in data["modes"]:
                mode["gain_of_reading_ahead"]["framing"].update(min=least, median=middle)

        return edit

    for least, middle, want in (
        (0.1, 0.2, scorecard.SUCCESS),
        (-0.1, 0.2, scorecard.MIXED),
        (-0.2, 0.0, scorecard.FAILURE),
    ):
        change(root, "storage", gains(least, middle))
        assert verdict(root, "ahead") == want


def test_what_nobody_knows_is_unknown(root):
    for name in ("board", "gpu", "power"):
        assert verdict(root, name) == scorecard.UNKNOWN
    (root / "sim" / "results" / "token.json").unlink()
    (missing,) = [result for result in scorecard.results(Inputs(root)) if result.claim.id == "selected"]
    assert (missing.verdict, missing.provenance) == (scorecard.UNKNOWN, "unknown")
    assert "token.json: not there" in missing.figure


def test_every_claim_has_a_rule_and_a_command():
    assert len({claim.id for claim in scorecard.CLAIMS}) == len(scorecard.CLAIMS)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {name for name in KINDS if Inputs().get(name).problem}  # not recorded, so nothing is claimed of it
    for claim in scorecard.CLAIMS:
        assert claim.success
        assert claim.failure
        for part in re.findall(r"make ([a-z0-9-]+)", claim.command):
            assert part in targets, claim.id
    for command_line, _ in KINDS.values():
        for part in re.findall(r"make ([a-z0-9-]+)", command_line):
            assert part in targets, command_line


def test_methods_name_the_tools(sections):
    for tool in ("verilator", "amaranth"):
        assert tool in sections["methods"].body


def test_first_screen_names_what_is_missing(root):
    (root / "sim" / "results" / "token.json").unlink()
    shown = top.first_screen(Inputs(root), [])
    assert "sim/results/token.json: not there" in shown
    assert "Not yet run" in shown


def test_an_input_says_where_it_is_from():
    assert Input("a.json", {}, None, "2020-01-01", "abc", "make x").source == "a.json, 2020-01-01, abc"
