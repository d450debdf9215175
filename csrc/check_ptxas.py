"""Compile every kernel for sm_90a and refuse what ptxas reports as slow.

A kernel that spills registers, keeps a stack frame or has its wgmma instructions serialised (ptxas warnings
C75xx) still gives right answers, so no numerical test sees it; this check does. Only device code is compiled.

Usage: ``python csrc/check_ptxas.py [--cache DIR] [FILE.cu ...]``. Exit status: 0 clean, 1 findings or a
compile error, 77 not checked because nvcc was not found.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parent
# As in CMakeLists.txt.
FLAGS = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v", "-arch=sm_90a"]
NOT_CHECKED = 77

_FUNCTION = re.compile(r"Function properties for (.+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_RESOURCES = re.compile(r"Used (\d+) registers(.*)")
_WARNING = re.compile(r"\(C75\d\d\)")


@dataclasses.dataclass
class Report:
    """What ptxas said of one file: a line per function, and the findings that fail the check."""

    functions: list[str]
    findings: list[str]


def find_nvcc() -> str | None:
    """Return nvcc as CMakeLists.txt finds it, or None."""
    if named := os.environ.get("CUDACXX"):
        return shutil.which(named)
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((found for place in places if (found := shutil.which(place))), None)


def parse(text: str) -> Report:
    """Read the report that ``ptxas -v`` writes to standard error."""
    report = Report([], [])
    function = "?"
    frame = ""
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            function = match[1]
        elif match := _FRAME.search(line):
            frame = line.strip()
            if any(int(count) for count in match.groups()):
                report.findings.append(f"{function}: {frame}")
        elif match := _RESOURCES.search(line):
            report.functions.append(f"{function}: {match[1]} registers{match[2]}; {frame}")
        elif _WARNING.search(line):
            report.findings.append(line.strip())
    return report


def demangle(text: str) -> str:
    """Make C++ names readable where a demangler is at hand."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if tool is None:
        return text
    return subprocess.run([tool], input=text, capture_output=True, text=True, check=True).stdout


def fingerprint(source: Path, nvcc_version: str) -> str:
    """Hash what the report depends on: the file, every header, the flags and the compiler."""
    digest = hashlib.sha256(json.dumps([FLAGS, nvcc_version, str(source.relative_to(CSRC))]).encode())
    headers = sorted(p for p in CSRC.rglob("*") if p.suffix in {".cuh", ".hpp", ".h", ".inl"})
    for path in [source, *headers, Path(__file__).resolve()]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def check(source: Path, nvcc: str, nvcc_version: str, cache: Path | None) -> Report:
    """Compile one file, or read its report from the cache, and return the report."""
    entry = cache / f"{fingerprint(source, nvcc_version)}.json" if cache else None
    if entry and entry.exists():
        return Report(**json.loads(entry.read_text()))
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, *FLAGS, f"-I{CSRC}", "-cubin", "-o", f"{folder}/out.cubin", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        return Report([], [f"does not compile:\n{done.stderr.strip()}"])
    report = parse(demangle(done.stderr))
    if entry:
        entry.parent.mkdir(parents=True, exist_ok=True)
        partial = entry.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(dataclasses.asdict(report)))
        partial.replace(entry)
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Check the named files, all of csrc by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sources", nargs="*", type=Path, metavar="FILE.cu")
    parser.add_argument("--cache", type=Path, help="folder for reports of unchanged files")
    options = parser.parse_args(argv)

    nvcc = find_nvcc()
    if nvcc is None:
        print("not checked: no nvcc in CUDACXX, PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda")
        return NOT_CHECKED
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    sources = [path.resolve() for path in options.sources] or sorted(CSRC.rglob("*.cu"))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        reports = list(pool.map(lambda source: check(source, nvcc, version, options.cache), sources))

    findings = 0
    for source, report in zip(sources, reports, strict=True):
        print(
            f"{source.relative_to(CSRC)}: {len(report.functions)} functions, {len(report.findings)} findings"
        )
        for line in report.functions:
            print(f"  {line}")
        for line in report.findings:
            print(f"  FAIL {line}")
        findings += len(report.findings)
    print(f"{len(sources)} files checked for sm_90a, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
