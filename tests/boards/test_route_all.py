import json

import pytest

from boards import build, route_all
from boards.catalogue import ECP5_BOARDS


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(route_all, "RESULTS", tmp_path)
    monkeypatch.setattr(route_all.table, "write", lambda path: None)
    return tmp_path


def record(results, board, params, *, met=True, **fields) -> None:
    result = {"design_id": build.current_id(board, params), "seeds": [1, 2, 3], "met": met} | fields
    (results / f"{board.result_name(params)}.json").write_text(json.dumps(result))


def test_all_are_wanted():
    """Each board by its own lanes, and the rows of other lanes."""
    names = [board.result_name(params) for board, params in route_all.wanted()]
    assert len(set(names)) == len(names)
    assert {*ECP5_BOARDS, "ulx3s_45f_t4", "ulx3s_85f_t1", "ecpix5_45f_t1"} == set(names)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_routes_what_is_missing_and_resumes(jobs, results, capsys):
    """Those routed already are passed over, all else is routed once; a result of other sources or seeds is none."""
    wanted = route_all.wanted()
    record(results, *wanted[0])
    record(results, *wanted[1], design_id="00000000")
    record(results, *wanted[2], seeds=[1])
    routed = []

    def run(board, params, seeds):
        routed.append(board.result_name(params))
        record(results, board, params)
        return 0

    assert route_all.main(["--jobs", jobs], run) == 0
    assert sorted(routed) == sorted(board.result_name(params) for board, params in wanted[1:])
    told = capsys.readouterr().out
    assert f"{wanted[0][0].name}: timing met, routed already" in told
    assert f"({len(wanted) - 1} of" not in told
    assert f"{len(wanted) - 1} of {len(wanted) - 1}" in told
    assert route_all.main([], run) == 0
    assert len(routed) == len(wanted) - 1


def test_failures_are_told_and_the_rest_goes_on(results, capsys):
    """A missed clock, now or in the recorded result, and a build that fails."""
    wanted = route_all.wanted()
    record(results, *wanted[0], met=False)
    statuses = {wanted[1][0].name: 1, wanted[2][0].name: 2}
    assert route_all.main([], lambda board, params, seeds: statuses.get(board.result_name(params), 0)) == 1
    told = capsys.readouterr()
    assert told.out.count("timing met") == len(wanted) - 3
    expected = [f"{wanted[0][0].name} (TIMING MISSED)", f"{wanted[1][0].name} (TIMING MISSED)"]
    assert f"error: {', '.join(expected)}, {wanted[2][0].name} (FAILED): see build/synth/NAME/build.log" in told.err


def test_jobs_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        route_all.main(["--jobs", "0"])
    assert "--jobs must be positive, not 0" in capsys.readouterr().err
