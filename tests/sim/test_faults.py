"""The fault campaign itself: small runs on the golden device, and that it would notice."""

import types

import pytest

from host.device import Device
from host.link import Parser
from hw.formats import frames
from hw.formats.frames import Flag, Header, Type
from tests import faults
from tests.faults import Hit, Injector, Outcome, Session


def run(name: str, count: int, seed: int = 1, **settings) -> list[Outcome]:
    return faults.run(Session(name, count, seed, **settings))


def became(outcomes: list[Outcome]) -> set[str]:
    return {outcome.became for outcome in outcomes}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("what", "count"),
    [("layers", 72), ("parts", 20), ("connections", 32), ("peers", 14), ("storage", 18), ("storms", 60)],
)
def test_campaign(what, count, seed):
    outcomes = run(f"golden:{what}:0", count, seed)
    assert sum(outcome.faults for outcome in outcomes) >= count
    assert became(outcomes) <= {"repaired", "reported", "harmless"}
    assert all(outcome.usable in (None, True) for outcome in outcomes)
    if what in ("layers", "peers", "storage"):
        assert {outcome.kind for outcome in outcomes} == set(
            {"layers": faults.KINDS, "peers": faults.PEER_KINDS, "storage": faults.STORAGE_KINDS}[what]
        )


@pytest.mark.cosim
def test_hardware():
    """As many faults as there are kinds, twice, on the Verilated device."""
    outcomes = run("axi-stream:layers:0", 2 * len(faults.KINDS))
    assert len(outcomes) == 2 * len(faults.KINDS)
    assert became(outcomes) <= {"repaired", "reported", "harmless"}


def test_repeatable():
    assert run("golden:layers:0", 24, seed=5) == run("golden:layers:0", 24, seed=5)
    assert run("golden:layers:0", 24, seed=5) != run("golden:layers:0", 24, seed=6)


# What it must notice.


def test_host_without_its_check(monkeypatch):
    monkeypatch.setattr(Parser, "_intact", lambda *_: True)
    outcomes = run("golden:layers:0", 24, kinds=("flip", "burst"), direction=False)
    assert "wrong" in became(outcomes)
    assert not faults.figures(outcomes, [])["ok"]


def test_device_without_its_check(monkeypatch):
    class Same:
        def __ne__(self, other):
            return False

    blind = types.SimpleNamespace(**{**vars(frames), "trailer": lambda *_: Same()})
    monkeypatch.setattr("sim.golden.device.frames", blind)
    outcomes = run("golden:layers:0", 24, kinds=("flip", "burst"), direction=True)
    assert "wrong" in became(outcomes)


@pytest.mark.parametrize("side", faults.BROKEN)
def test_check_to_remove(side):
    """What the campaign takes out of the sources is there."""
    file, old, new = faults.BROKEN[side]
    assert (faults.ROOT / file).read_text().count(old) == 1
    assert new != old


def test_unseen(monkeypatch):
    """Right numbers are not enough: somebody must have noticed."""
    monkeypatch.setattr(faults.Bench, "moved", lambda *_: "")
    outcomes = run("golden:layers:0", 8)
    assert "unseen" in became(outcomes)
    assert not faults.figures(outcomes, [])["ok"]


def test_hang(monkeypatch):
    """A driver that waits for ever."""
    right = Device.run_layer
    runs = []

    def waits(self, *args, **settings):
        runs.append(1)
        if len(runs) == 1:  # without a fault
            return right(self, *args, **settings)
        while True:
            self.transport.read(self.transport.patience)

    monkeypatch.setattr(Device, "run_layer", waits)
    with pytest.raises(RuntimeError, match="without a fault: hung"):
        run("golden:layers:0", 3)


def test_hang_after_a_fault(monkeypatch):
    """No retries, no limits: what is lost is waited for."""
    right = faults.Bench.layer

    def waits(bench, store=None):
        passed = bench.injector.passed[True]
        result = right(bench, store)
        while bench.injector.hit is not None and passed:
            bench.injector.read(1.0)
        return result

    monkeypatch.setattr(faults.Bench, "layer", waits)
    outcomes = run("golden:layers:0", 3)
    assert [outcome.became for outcome in outcomes] == ["hung"]


def test_hang_while_the_clock_stands(monkeypatch):
    """Reads that are asked to wait for nothing, again and again."""
    right = faults.Bench.connect

    def waits(bench):
        result = right(bench)
        while bench.injector.hit is not None:
            bench.injector.read(0)
        return result

    monkeypatch.setattr(faults.Bench, "connect", waits)
    outcomes = run("golden:connections:0", 3)
    assert [(outcome.became, outcome.evidence) for outcome in outcomes] == [("hung", "the clock stands")]


def test_crash(monkeypatch):
    """An error that is none of the driver's is no report."""
    monkeypatch.setattr(faults.Bench, "connect", lambda bench: bench.device.reset() or {}[1])
    outcomes = run("golden:connections:0", 3)
    assert [outcome.became for outcome in outcomes] == ["crashed"]


def test_without_a_fault(monkeypatch):
    """Counters that move by themselves would pass for detection."""
    monkeypatch.setattr(faults.Bench, "moved", lambda *_: "host: garbage 1")
    with pytest.raises(RuntimeError, match="without a fault: right True, moved: host: garbage 1"):
        run("golden:layers:0", 3)


ACK, POLL = Header(Type.ACK), Header(Type.ACK, Flag.POLL)
MESSAGE, SYNC, STATUS = Header(Type.MESSAGE), Header(Type.SYNC), Header(Type.STATUS)


@pytest.mark.parametrize(
    ("kind", "header", "superseded", "follower", "accepted"),
    [
        ("drop", ACK, True, ACK, True),
        ("drop", ACK, False, ACK, False),
        ("drop", POLL, True, ACK, False),
        ("drop", MESSAGE, True, ACK, False),
        ("flip", ACK, True, ACK, False),
        ("duplicate", STATUS, False, None, True),
        ("duplicate", MESSAGE, False, None, False),
        ("reorder", MESSAGE, True, ACK, True),
        ("reorder", MESSAGE, True, MESSAGE, False),
        ("garbage", SYNC, False, None, True),
        ("garbage", MESSAGE, False, None, False),
        ("frozen", MESSAGE, False, None, True),
        ("silent", MESSAGE, False, None, False),
    ],
)
def test_harmless(kind, header, superseded, follower, accepted):
    injector = types.SimpleNamespace(hit=Hit(kind, True, header, "", 100), superseded=superseded, follower=follower)
    assert bool(faults.harmless(injector)) is accepted  # type: ignore[arg-type]


def test_verdict():
    good = [Outcome("uart", "flip", "", "repaired", "host: garbage 1", 0.1)]
    caught, missed = {"receiver": "host", "faults": 9, "wrong": 3}, {"receiver": "host", "faults": 9, "repaired": 9}
    assert faults.figures(good, [caught])["ok"]
    assert not faults.figures(good, [missed])["ok"]
    assert not faults.figures([good[0]._replace(became="hung")], [caught])["ok"]
    assert not faults.figures([good[0]._replace(became="reported", usable=False)], [caught])["ok"]
    assert "flip" in faults.table(faults.figures(good, [caught]))


def test_plan():
    full = faults.sessions(1, 1.0)
    single = [session for session in full if session.what != "storms"]
    assert sum(session.count for session in single) >= faults.LEAST_FAULTS
    assert {session.link for session in full} == {"axi-stream", "uart"}
    assert len({session.name for session in full}) == len(full)
    assert sum(session.count for session in faults.sessions(1, 0.01)) < 60


def test_command_needs_faults(tmp_path, monkeypatch, capsys):
    """Few faults are no verdict."""
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    monkeypatch.setattr(faults, "PLAN", {"golden:layers": (8, 1)})
    assert faults.main(["--only", "golden", "--processes", "1"]) == 1
    assert "no verdict" in capsys.readouterr().out
    assert (tmp_path / "build" / "faults" / "report.json").exists()


def test_command_without_sessions(capsys):
    assert faults.main(["--only", "usb"]) == 1
    assert "no session's name begins with 'usb'; names begin with uart:parts" in capsys.readouterr().err


def test_injector_forgets_nothing(monkeypatch):
    """A stalled port keeps the order of what was written to it."""
    injector = Injector("golden", Session("golden:layers:0", 1, 1).rng)
    sent: list[bytes] = []
    monkeypatch.setattr(injector._transport, "write", sent.append)
    injector._mute_until = injector.now() + 1
    frame = frames.frame(ACK)
    injector.write(frame)
    injector.write(frames.frame(POLL))
    assert sent == []
    injector.heal()
    injector.write(frame)
    assert b"".join(sent) == frame + frames.frame(POLL) + frame
