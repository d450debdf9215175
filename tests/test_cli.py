"""The command line through its console script, as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pageweaver as pw
from pageweaver.common.captures import save_selections
from pageweaver.common.supports import preset, streams
from pageweaver.eval.compare import counting_problem
from pageweaver.eval.doctor import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
CAPTURES = ROOT / "captures" / "smollm2_64k.safetensors"
SCRIPT = str(Path(sys.executable).parent / "pageweaver")
PNG = b"\x89PNG\r\n\x1a\n"

Finished = subprocess.CompletedProcess[str]


def environment(**changes: str) -> dict[str, str]:
    # One thread: small tensors only wait for more, and for long on a busy machine.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PAGEWEAVER_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1", **changes}


def run(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    return subprocess.run(
        [SCRIPT, *map(str, words)],
        cwd=cwd,
        env=environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=240,
    )


def json_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def strategy_for(name: str, selection: pw.Selection) -> pw.Strategy:
    if not name.startswith("offline_w"):
        return pw.load(name)
    return pw.load(name, ids=pw.search(selection, window=int(name.removeprefix("offline_w"))))


@pytest.fixture(scope="module")
def selections() -> list[pw.Selection]:
    """One request, and several with two KV heads, one of them without queries."""
    several = streams(query_lens=[40, 0, 25], prefix_lens=[700, 64, 1000], num_kv_heads=2, topk=6, seed=1)
    return [preset("mid", total_q=96, prefix=4096), several]


@pytest.fixture(scope="module")
def selection_file(selections: list[pw.Selection], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("selections") / "small.safetensors"
    save_selections(path, selections)
    return path


def test_version(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"pageweaver {pw.__version__}\n")
    module = subprocess.run(
        [sys.executable, "-m", "pageweaver", "--version"], capture_output=True, text=True, cwd=tmp_path
    )
    assert module.stdout == done.stdout


def test_help_shows_no_value_for_a_flag(tmp_path: Path) -> None:
    for words, name in (
        (("bench", "operator"), "--quick"),
        (("search",), "--resume"),
        (("report",), "--readme"),
    ):
        shown = run(*words, "--help", cwd=tmp_path).stdout
        assert name in shown and not [x for x in shown.splitlines() if name in x and "<bool>" in x]


# --- compare ---


def test_compare(selections: list[pw.Selection], selection_file: Path, tmp_path: Path) -> None:
    done = run("compare", selection_file, "--rows", "24", "--output", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["compare.jsonl", "compare.png"]
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(PNG)
    rows = json_rows(tmp_path / "out" / "compare.jsonl")
    assert [(r["selection"], r["strategy"]) for r in rows] == [
        (s.name, name) for s in selections for name in pw.available()
    ]
    by_name = {s.name: s for s in selections}
    for row in rows:
        selection = by_name[row["selection"]]
        work = strategy_for(row["strategy"], selection).work(pw.make_problem(selection))
        assert {k: row[k] for k in work.to_dict()} == work.to_dict()
        assert row["moved_bytes"] == work.moved_bytes
        assert row["sha256"] == selection.sha256
        assert 0.001 < row["nrms"] < 0.05 and row["nrms_backend"] == "reference"
        assert row["time_ms"] is None and row["device"] == "cpu"
        assert row["torch"] == torch.__version__
        assert row["nrms_tail_rows"] == 24
        last = int(selection.cu_seqlens_q[-1])
        assert row["nrms_rows"] == sorted(set(row["nrms_rows"])) and len(row["nrms_rows"]) == 24
        assert last - 24 <= row["nrms_rows"][0] and row["nrms_rows"][-1] < last
        assert (row["search_seconds"] is None) != row["strategy"].startswith("offline_w")
        # What the table shows is what the rows hold.
        cells = [f"{row['visits']:,}", f"{row['reuse']:.2f}", f"{row['rounds']:,}", f"{row['partials']:,}"]
        line = re.escape(row["strategy"]) + r"\s+" + r"\s+".join(map(re.escape, cells))
        assert re.search(line, done.stdout), (line, done.stdout)
    # Strategies that own their queries compute the same bits.
    for selection in selections:
        own = {r["nrms"] for r in rows if r["selection"] == selection.name and r["partials"] == 0}
        assert len(own) == 1
    table_lines = [x for x in done.stdout.splitlines() if not x.startswith("Wrote")]
    assert max(map(len, table_lines)) <= 80
    assert "How to read:" in done.stdout and "from the last 24 queries" in done.stdout


def test_compare_without_arguments_takes_the_real_captures(tmp_path: Path) -> None:
    done = run("compare", "--strategies", "union8,union4,union8", "--rows", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json_rows(tmp_path / "results" / "compare" / "compare.jsonl")
    assert [(r["selection"], r["visits"]) for r in rows if r["strategy"] == "union8"] == [
        ("austen-a.L18.h2", 164_000),
        ("austen-a.L4.h0", 64_355),
        ("austen-a.L4.h1", 44_994),
    ]
    assert [r["strategy"] for r in rows] == ["union8", "union4"] * 3
    assert "positions 64,420 to 64,423" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare missing.safetensors", "synthetic:low|mid|high|interleaved (there is no such file)\n"),
        ("compare synthetic:lo", "Error: selection: got 'synthetic:lo', supported: synthetic:low|mid|high|"),
        ("compare SMALL:nobody", "Error: names: got 'nobody', supported by"),
        ("compare SMALL --strategies union8,union9", "Error: strategies: got 'union9', supported: per_query"),
        ("compare SMALL --group-size 3", "Error: group_size: got 3, supported: (1, 2, 4, 8, 16)"),
        ("compare SMALL --output SMALL", "Error: output: got"),
        ("compare SMALL --rows 0", "Invalid value for '--rows'"),
        (
            "survey text.txt",
            "Error: path: got text.txt, supported: a selection file (this is no safetensors file",
        ),
        ("search SMALL --output ids.safetensors", "Error: selection: got 2 of"),
        *(
            (f"{words} no/x", "Error: output: got no/x, supported: a file in an existing folder")
            for words in (
                "search SMALL:synthetic.mid --output",
                "capture model text.txt",
                *(
                    f"bench {name} --output"
                    for name in ("operator", "ablations", "numerics", "scaling", "prefill")
                ),
            )
        ),
        *(
            (f"{words} no/x", "Error: output: got no/x, supported: a folder in an existing folder")
            for words in ("compare SMALL --output", "survey SMALL --output", "report text.txt --output")
        ),
        ("compare SMALL --output text.txt/x/y", "Error: output: got text.txt/x/y, supported: a folder ("),
        (
            "search SMALL:synthetic.mid --output text.txt/x",
            "Error: output: got text.txt, supported: a folder (",
        ),
        ("search SMALL:synthetic.mid --output ids --resume", "Error: seconds: got 0 with --resume"),
        ("search SMALL:synthetic.mid --output ids --seconds inf", "Error: seconds: got inf"),
        (
            "search SMALL:synthetic.mid --output ids --seconds 1 --resume",
            "Error: path: got 'ids', supported: an existing file of ids",
        ),
        ("search SMALL:synthetic.mid --output text.txt --seconds 1 --resume", "Error: path: got 'text.txt'"),
        (
            "compare SMALL --output /proc/x",
            "Error: output: got /proc/x, supported: a folder that can be written",
        ),
        ("survey SMALL --output /proc/x", "Error: output: got /proc/x, supported"),
        ("search SMALL:synthetic.mid --output /proc/x", "Error: output: got /proc, supported"),
        ("search SMALL:synthetic.mid --output .", "Error: output: got ., supported: a file"),
        ("capture model text.txt /proc/x", "Error: output: got /proc, supported"),
        ("report missing.jsonl", "Error: rows: got missing.jsonl, supported: a text file (No such file"),
        ("report .", "Error: rows: got ., supported: a text file (Is a directory"),
        ("report text.txt --output /proc/x", "Error: output: got /proc/x, supported"),
        ("bench operator SMALL --output /proc/x", "Error: output: got /proc, supported"),
        (
            "bench scaling --workload missing.jsonl",
            "Error: workload: got missing.jsonl, supported: a text file (No such",
        ),
        ("bench scaling --workload .", "Error: workload: got ., supported: a text file (Is a directory"),
        ("survey missing.safetensors", "Error: selection: got 'missing.safetensors', supported: FILE"),
        ("survey .", "synthetic:low|mid|high|interleaved (this is a folder)\n"),
        ("capture model text.txt out.st --layers 1-x", "Error: layers: got '1-x', supported: numbers"),
        # What a command reads is not where it writes.
        ("capture model text.txt ./text.txt", "Error: output: got text.txt, which is read"),
        (
            "search SMALL:synthetic.mid --output SMALL",
            "small.safetensors, which is read, supported: another file",
        ),
        ("bench operator SMALL --output SMALL", "small.safetensors, which is read, supported: another file"),
        ("bench scaling --workload text.txt --output text.txt", "Error: output: got text.txt, which is read"),
        ("bench numerics SMALL --inputs , --output o", "Error: inputs: got ',', supported: some of normal, "),
    ],
)
def test_errors_are_one_line(words: str, message: str, selection_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged")
    done = run(*words.replace("SMALL", str(selection_file)).split(), cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    if "Invalid" not in message:
        assert done.stderr.count("\n") == 1 and done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("name", ["[red]x [/bold]", r"x$\frac$"])
def test_names_that_look_like_markup(name: str, tmp_path: Path) -> None:
    save_selections(tmp_path / "s.st", [replace(preset("mid", total_q=16, prefix=512), name=name)])
    for words in ("bench operator s.st --strategies union8 --output o.jsonl", "compare s.st", "survey s.st"):
        done = run(*words.split(), cwd=tmp_path, env=environment(COLUMNS="150"))
        assert done.returncode == 0 and name in done.stdout, done.stderr
    assert json_rows(tmp_path / "o.jsonl")[0]["case"] == name


def test_no_gpu_is_an_error(selection_file: Path, tmp_path: Path) -> None:
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = run("compare", selection_file, "--device", "cuda", cwd=tmp_path, env=env)
    assert done.returncode == 2 and done.stderr.startswith("Error: device: got cuda")


def test_reader_that_leaves(selection_file: Path, tmp_path: Path) -> None:
    """`| head -1`: the rest of the work is done and written all the same."""
    with interruptible([SCRIPT, "compare", str(selection_file), "--rows", "8"], tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=120) == 0
    written = {p.name for p in (tmp_path / "results" / "compare").iterdir()}
    assert written == {"compare.jsonl", "compare.png"}


def test_rows_outlive_a_full_output(selection_file: Path, tmp_path: Path) -> None:
    """Nobody sees the tables of a stdout that takes no byte; what was computed is on disk."""
    words = ("compare", selection_file, "--strategies", "union8", "--rows", "8", "--output", "out")
    for command, written in (
        (words, Path("out") / "compare.jsonl"),
        (("bench", "operator", selection_file, "--output", "o.jsonl"), Path("o.jsonl")),
    ):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [SCRIPT, *map(str, command)],
                cwd=tmp_path,
                env=environment(),
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                timeout=240,
            )
        assert done.returncode == 2
        assert json_rows(tmp_path / written) and done.stderr.startswith("Error: [Errno 28]")
        assert not (tmp_path / f"{written}.partial").exists()


@contextmanager
def interruptible(words: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that Ctrl-C reaches, also where the tests run in the background and ignore it."""
    process = subprocess.Popen(
        words,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_ctrl_c_while_torch_is_imported(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", SCRIPT, "doctor"]
    with interruptible(words, tmp_path) as process:
        assert process.stderr is not None
        for line in process.stderr:
            # What torch imports is listed before torch itself.
            if "torch." in line:
                break
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    said = [line for line in errors.splitlines() if not line.startswith("import time:")]
    assert said == ["Interrupted."]


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_files_as_they_were(
    asked: signal.Signals, code: int, selection_file: Path, tmp_path: Path
) -> None:
    """And so does the signal of a time limit."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "compare.jsonl").write_text("old\n")
    # The second selection takes minutes: the signal falls into it, after the first one's table.
    small = f"{selection_file}:synthetic.mid"
    words = [SCRIPT, "compare", small, str(CAPTURES), "--rows", "15272", "--output", str(out)]
    with interruptible(words, tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("How to read"):
                break
        process.send_signal(asked)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    kept = out / "compare.jsonl.partial"
    finished = len(pw.available())
    assert errors == (
        f"Kept {finished} finished rows in {kept}.\nInterrupted; no file was left half-written.\n"
    )
    assert sorted(p.name for p in out.iterdir()) == ["compare.jsonl", kept.name]
    assert [row["strategy"] for row in json_rows(kept)] == list(pw.available())
    assert (out / "compare.jsonl").read_text() == "old\n"


# --- survey, search, capture, doctor ---


def test_survey(tmp_path: Path) -> None:
    done = run("survey", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "survey" / "survey.png").read_bytes().startswith(PNG)
    source, *observed = json_rows(tmp_path / "results" / "survey" / "survey.jsonl")
    assert (source["kind"], source["source"], source["observations"]) == ("source", "austen-a", 3)
    expected = {(18, 2): 164_000, (4, 0): 64_355, (4, 1): 44_994}
    assert {(r["layer"], r["kv_head"]): r["visits"] for r in observed} == expected
    assert [r["layer"] for r in observed] == [4, 4, 18]
    edges = 15_272 * 16
    reuse = sorted(edges / visits for visits in expected.values())
    assert [source[k] for k in ("min", "median", "max")] == pytest.approx(reuse)
    assert re.search(r"austen-a\s+3\s+1\.49\s+2\.64\s+3\.80\s+4\.61\s+5\.43", done.stdout)
    assert re.search(r"\n\s+4\s+3\.80\s+5\.43\s+-\n\s+18\s+-\s+-\s+1\.49\n", done.stdout)


@pytest.mark.parametrize(("window", "objective"), [("512", "visits"), ("2048", None)])
def test_search_then_run_the_ids(
    window: str, objective: str | None, selections: list[pw.Selection], selection_file: Path, tmp_path: Path
) -> None:
    selection = selections[1]
    words = ["--window", window, "--output", "ids.safetensors"]
    words += [] if objective is None else ["--objective", objective]
    done = run("search", f"{selection_file}:{selection.name}", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["ids.safetensors"]
    ids = pw.OfflineIds.load(tmp_path / "ids.safetensors")
    assert (ids.window, ids.objective, ids.selection_sha256) == (
        int(window),
        objective or "rounds",
        selection.sha256,
    )
    problem = pw.make_problem(selection)
    strategy = pw.load(f"offline_w{window}", ids=ids)
    assert torch.equal(strategy(problem), pw.load("union8")(problem))
    for label, work in (
        ("original (union8)", pw.load("union8").work(problem)),
        (f"searched, window {window}", strategy.work(problem)),
    ):
        cells = rf"\s+{work.visits:,}\s+{work.reuse:.2f}\s+{work.rounds:,}"
        assert re.search(re.escape(label) + cells, done.stdout), done.stdout


def test_search_goes_on(selections: list[pw.Selection], selection_file: Path, tmp_path: Path) -> None:
    selection = selections[1]
    words = ["search", f"{selection_file}:{selection.name}", "--output", "ids.safetensors", "--window", "512"]
    words += ["--objective", "visits"]  # so few queries run one to a tile: rounds are edges in any order
    done = run(*words, "--seconds", "0.3", "--seed", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = pw.OfflineIds.load(tmp_path / "ids.safetensors")
    assert first.bound <= first.visits < first.greedy_visits
    assert re.search(rf"greedy\s+{first.greedy_visits:,}\s+\S+\s+{first.greedy_rounds:,}\n", done.stdout)
    assert re.search(rf"searched, window 512\s+{first.visits:,}\s+\S+\s+{first.rounds:,}\n", done.stdout)
    assert re.search(rf"lower bound\s+{first.bound:,}\s+-\s+[\d,]+\n", done.stdout)

    done = run(*words, "--seconds", "0.2", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    second = pw.OfflineIds.load(tmp_path / "ids.safetensors")
    assert (second.visits, second.rounds) <= (first.visits, first.rounds)
    assert second.greedy_visits == first.greedy_visits
    problem = pw.make_problem(selection)
    assert torch.equal(pw.load("offline_w512", ids=second)(problem), pw.load("union8")(problem))

    before = (tmp_path / "ids.safetensors").read_bytes()
    for change, message in (
        (
            ["--objective", "rounds"],
            "objective: got rounds with --resume, supported: visits, of the ids",
        ),
        (["--window", "2048"], "window: got 2048 with --resume, supported: 512, of the ids"),
        (["--group-size", "8"], "start.queries_per_group: got 8, supported: 16"),
    ):
        done = run(*words, "--seconds", "1", "--resume", *change, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith(f"Error: {message}")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: output: got ids.safetensors, which has ids that a search improved")
    words[1] = f"{selection_file}:{selections[0].name}"
    done = run(*words, "--seconds", "1", "--resume", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("Error: start: got ids of another selection")
    assert (tmp_path / "ids.safetensors").read_bytes() == before


@pytest.mark.parametrize(("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_best_ids_so_far(asked: signal.Signals, code: int, tmp_path: Path) -> None:
    # The bar, on a terminal alone, would say when the search runs; a pipe says nothing, so the call does.
    script = """
import sys
from pageweaver.__main__ import main
from pageweaver.strategies.regroup import offline

inner = offline.run_slices

def told(*arguments):
    print("searching", flush=True)
    inner(*arguments)

offline.run_slices = told
main()
"""
    words = ["search", f"{CAPTURES}:austen-a.L4.h1", "--output", "ids", "--window", "512", "--seconds", "200"]
    with interruptible([sys.executable, "-c", script, *words], tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "searching\n"
        time.sleep(1)
        process.send_signal(asked)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert (output, errors) == ("", "Interrupted; ids has the best found so far.\n")
    assert [p.name for p in tmp_path.iterdir()] == ["ids"]
    ids = pw.OfflineIds.load(tmp_path / "ids")
    assert ids.bound <= ids.rounds < ids.greedy_rounds and ids.greedy_visits < 44_994
    selection = pw.resolve_selection(f"{CAPTURES}:austen-a.L4.h1")[0]
    work = pw.load("offline_w512", ids=ids).work(counting_problem(selection, 16))
    assert (work.visits, work.rounds) == (ids.visits, ids.rounds)


def test_capture(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra [capture] is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="the extra [capture] is not installed")
    words = [f"w{i}" for i in range(50)]
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "w0"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(tmp_path / "model")
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, max_position_embeddings=64, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(" ".join(words[i * i % 50] for i in range(100)))
    options = "--max-tokens 90 --prefix-tokens 30 --page-size 8 --topk 3 --layers 0,2 --chunk-tokens 16"
    files = ("model", "book.txt", "book.safetensors")
    done = run("capture", *files, *options.split(), cwd=tmp_path, env=environment(HF_HUB_OFFLINE="1"))
    assert done.returncode == 0, done.stderr
    # One line, without the source line that warned.
    assert re.search(r"^Warning: 90 tokens are more than the 64 positions .*$", done.stderr, re.MULTILINE)
    captured = pw.load_selections(tmp_path / "book.safetensors")
    assert [s.name for s in captured] == [f"book.L{layer}.h{head}" for layer in (0, 2) for head in (0, 1)]
    assert all(s.q2k_indices.shape == (1, 60, 3) and s.page_size == 8 for s in captured)
    assert "4 selections of 60 queries x Top3" in done.stdout


def test_capture_says_how_to_get_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a b c")
    fakes = tmp_path / "fakes"
    fakes.mkdir()
    (fakes / "transformers.py").write_text("raise ImportError('not here')")
    env = environment(PYTHONPATH=str(fakes))
    done = run("capture", "model", "book.txt", "out.safetensors", cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and "pip install '.[capture]'" in done.stderr
    assert not (tmp_path / "out.safetensors").exists()


def test_doctor(tmp_path: Path) -> None:
    done = run("doctor", cwd=tmp_path, env=environment(PAGEWEAVER_NONSENSE="1", COLUMNS="120"))
    assert done.returncode == 0, done.stdout
    for word in ("python", torch.__version__, "numpy", "scipy", "triton", "nvcc", "_native", "_cuda"):
        assert word in done.stdout
    assert re.search(r"check\s+ok\s+regroup_w64 on 64 queries, NRMS [0-9.]+% to", done.stdout)
    assert re.search(r"PAGEWEAVER_NONSENSE\s+-\s+set, but nothing reads it", done.stdout)
    assert "The CPU path" in done.stdout


def test_doctor_fails_where_the_cpu_path_does(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['pageweaver._native'] = None; sys.argv = ['pageweaver', 'doctor'];"
    code = f"{hide} from pageweaver.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "make venv" in done.stdout and "The CPU path does not work" in done.stdout


def test_doctor_knows_every_environment_variable() -> None:
    read = set()
    for folder in ("pageweaver", "common", "strategies", "eval", "bridges", "csrc"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cpp", ".hpp", ".cu", ".cuh"}:
                found = re.findall(r"(?:environ|getenv)\W[^\n]*?[\"'](PAGEWEAVER_\w+)", path.read_text())
                read |= set(found)
    assert read == set(ENVIRONMENT)
