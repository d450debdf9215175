"""What an installed PageWeaver holds: its modules, its names, and kernels that ptxas finds clean."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pageweaver.common.errors import UnsupportedDeviceError
from pageweaver.common.native import cuda_status, load_cuda, load_native

ROOT = Path(__file__).resolve().parents[1]
CHECK_PTXAS = ROOT / "csrc" / "check_ptxas.py"


def _python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def test_native_loads() -> None:
    assert callable(load_native().greedy_order)


def test_missing_native_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pageweaver._native", None)
    with pytest.raises(ImportError, match=r"pageweaver\._native does not load.*make venv"):
        load_native()


def test_cuda_status_and_load_agree() -> None:
    built, reason = cuda_status()
    assert reason
    if built:
        assert load_cuda().__name__ == "pageweaver._cuda"
    else:
        with pytest.raises(UnsupportedDeviceError) as caught:
            load_cuda()
        assert reason in str(caught.value)


def test_cuda_module_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    info = importlib.import_module("pageweaver._build_info")
    monkeypatch.setattr(info, "BUILT_CUDA", True)
    monkeypatch.setitem(sys.modules, "pageweaver._cuda", None)
    with pytest.raises(UnsupportedDeviceError, match="built but does not load"):
        load_cuda()


@pytest.mark.parametrize("name", ["common", "strategies", "eval", "bridges", "tests", "csrc"])
def test_folders_do_not_reach_the_top_level(name: str, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print(u.find_spec({name!r}))"
    assert _python(code, tmp_path) == "None"


@pytest.mark.parametrize("name", ["common", "strategies", "bridges", "eval"])
def test_folders_are_packages_of_pageweaver(name: str, tmp_path: Path) -> None:
    code = f"import pageweaver.{name} as module; print(module.__name__)"
    assert _python(code, tmp_path) == f"pageweaver.{name}"


def test_ptxas_finds_no_spill_frame_or_serialised_wgmma() -> None:
    command = [sys.executable, str(CHECK_PTXAS), "--cache", str(ROOT / "build" / "ptxas")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr


def test_ptxas_report_is_read() -> None:
    spec = importlib.util.spec_from_file_location("check_ptxas", CHECK_PTXAS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    report = module.parse(
        "ptxas info    : Function properties for clean\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 24 registers, used 1 barriers\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas info    : Function properties for heavy\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 255 registers\n"
    )
    assert [line.split(":")[0] for line in report.functions] == ["clean", "heavy"]
    assert len(report.findings) == 2
    assert "C7510" in report.findings[0]
    assert report.findings[1].startswith("heavy: 8 bytes stack frame")
