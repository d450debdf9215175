"""Selections: what they accept, and the files that hold them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from pageweaver.common.captures import (
    FORMAT_NAME,
    Selection,
    atomic_write_bytes,
    convert_npz,
    load_selections,
    parse_capture_name,
    resolve_selection,
    save_selections,
)

CAPTURES = Path(__file__).resolve().parents[1] / "captures"
COMMITTED = CAPTURES / "smollm2_64k.safetensors"


def make(
    name: str = "a",
    indices: object = ((0, 1), (1, -1), (0, 2)),
    cu: object = (0, 3),
    seq: object = (300,),
    page_size: object = 128,
    **metadata: object,
) -> Selection:
    array = np.asarray(indices)
    return Selection(name, array if array.ndim == 3 else array[None], cu, seq, page_size, metadata)  # type: ignore[arg-type]


def reuse(selection: Selection, group: int = 8) -> float:
    """Edges per visit (Eq. 3), one request, valid ascending ids."""
    ids = selection.q2k_indices.astype(np.int64)
    edges = visits = 0
    for head in ids:
        chosen = head >= 0
        edges += int(chosen.sum())
        keys = (np.arange(len(head)) // group)[:, None] * (ids.max() + 1) + head
        visits += np.unique(keys[chosen]).size
    return edges / visits


# --- Selection ---


def test_properties() -> None:
    selection = make(indices=np.zeros((2, 9, 3), np.int64), cu=[0, 4, 4, 7], seq=[10, 0, 203])
    assert (selection.num_kv_heads, selection.total_q, selection.topk, selection.batch_size) == (2, 9, 3, 3)
    assert (
        selection.q2k_indices.dtype == selection.cu_seqlens_q.dtype == selection.seqused_k.dtype == np.int32
    )
    # Rows 7 and 8 belong to no request.
    np.testing.assert_array_equal(selection.positions, [6, 7, 8, 9, 200, 201, 202, -1, -1])


def test_ids_are_kept_as_they_are() -> None:
    junk = [[5, -1, 5, 2**31 - 1, -(2**31), -2]]
    np.testing.assert_array_equal(make(indices=junk, cu=[0, 1], seq=[1]).q2k_indices, [junk])


def test_arrays_are_read_only_copies() -> None:
    mine = np.zeros((1, 3, 2), np.int32)
    selection = make(indices=mine)
    before = selection.sha256
    mine[:] = 7
    assert selection.q2k_indices.max() == 0 and selection.sha256 == before
    for array in (selection.q2k_indices, selection.cu_seqlens_q, selection.seqused_k, selection.positions):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 1


def test_a_view_of_a_writable_base_is_copied() -> None:
    # A read-only view alone proves nothing: its base can still be written.
    base = np.zeros((1, 3, 2), np.int32)
    view = base[:]
    view.setflags(write=False)
    selection = make(indices=view)
    base[:] = 7
    assert selection.q2k_indices.max() == 0


@pytest.mark.parametrize(
    "cu, seq, rows", [([0], [], 0), ([0, 0, 0], [0, 5], 0), ([0, 0, 3, 3], [0, 3, 9], 3)]
)
def test_empty_batches_and_requests(cu: list[int], seq: list[int], rows: int) -> None:
    selection = make(indices=np.zeros((1, rows, 4), np.int32), cu=cu, seq=seq)
    assert selection.positions.tolist() == list(range(rows))
    assert selection.batch_size == len(seq)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"name": ""}, ValueError, "name: got ''"),
        ({"name": "a:b"}, ValueError, "name: got 'a:b'"),
        ({"name": 3}, TypeError, "name: got int"),
        ({"indices": np.zeros((1, 3, 2))}, TypeError, "q2k_indices: got float64"),
        ({"indices": np.zeros((1, 3, 2), bool)}, TypeError, "q2k_indices: got bool"),
        ({"indices": np.zeros((1, 1, 3, 2), int)[0, 0, 0]}, ValueError, r"q2k_indices: got \(1, 2\)"),
        ({"indices": np.zeros((0, 3, 2), int)}, ValueError, "q2k_indices"),
        ({"indices": np.zeros((1, 3, 0), int)}, ValueError, "q2k_indices"),
        ({"indices": [[2**31, 0]] * 3}, ValueError, "q2k_indices: got values from 0 to 2147483648"),
        ({"cu": []}, ValueError, "cu_seqlens_q"),
        ({"cu": [1, 3]}, ValueError, r"cu_seqlens_q: got \[1, 3\]"),
        ({"cu": [0, 3, 2], "seq": [9, 9]}, ValueError, "never decrease"),
        ({"cu": [0, 4]}, ValueError, r"cu_seqlens_q\[-1\]: got 4, supported: at most total_q, 3"),
        ({"seq": [300, 300]}, ValueError, "seqused_k: got 2 values"),
        ({"seq": [2]}, ValueError, r"seqused_k\[0\]: got 2"),
        ({"seq": [300.0]}, TypeError, "seqused_k: got float64"),
        ({"page_size": 0}, ValueError, "page_size: got 0"),
        ({"page_size": 128.0}, TypeError, "page_size: got float"),
        ({"page_size": True}, TypeError, "page_size: got bool"),
    ],
)
def test_refusals_name_argument_and_value(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(**changes)  # type: ignore[arg-type]


def test_metadata_must_be_a_mapping() -> None:
    with pytest.raises(TypeError, match="metadata: got list"):
        Selection("a", np.zeros((1, 1, 1), int), np.array([0, 1]), np.array([1]), 128, [])  # type: ignore[arg-type]


def test_hash_covers_what_is_read_and_nothing_else() -> None:
    base = make()
    assert make(name="b", note="x").sha256 == base.sha256
    assert make(indices=np.array(base.q2k_indices, dtype=np.int16)).sha256 == base.sha256
    others = [
        make(indices=[[0, 1], [-1, 1], [0, 2]]),
        make(cu=[0, 2]),
        make(seq=[301]),
        make(page_size=64),
        make(indices=[[0], [1], [1], [-1], [0], [2]]),
    ]
    assert len({base.sha256, *(o.sha256 for o in others)}) == 6


def test_tail() -> None:
    selection = make(indices=np.arange(10).reshape(5, 2), cu=[0, 2, 5], seq=[9, 300], layer=4)
    tail = selection.tail(2)
    np.testing.assert_array_equal(tail.q2k_indices, [[[6, 7], [8, 9]]])
    assert tail.name == "a.tail2" and tail.metadata["layer"] == 4 and tail.metadata["tail_of"] == "a"
    np.testing.assert_array_equal(tail.positions, selection.positions[-2:])
    for rows in (0, 4):
        with pytest.raises(ValueError, match=f"rows: got {rows}, supported: 1 to the last request's 3"):
            selection.tail(rows)
    with pytest.raises(TypeError, match="rows: got float"):
        selection.tail(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size: got 0"):
        make(indices=np.zeros((1, 0, 1), int), cu=[0], seq=[]).tail(1)


def test_tail_leaves_out_rows_of_no_request() -> None:
    selection = make(indices=np.arange(10).reshape(5, 2), cu=[0, 4], seq=[9])
    np.testing.assert_array_equal(selection.tail(1).q2k_indices, [[[6, 7]]])


def test_tail_is_of_the_last_request_with_queries() -> None:
    selection = make(indices=np.arange(10).reshape(5, 2), cu=[0, 2, 5, 5], seq=[9, 300, 7])
    tail = selection.tail(2)
    assert selection.tail_rows == 3 and tail.seqused_k.tolist() == [300]
    np.testing.assert_array_equal(tail.positions, [298, 299])
    empty = make(indices=np.arange(10).reshape(5, 2), cu=[0, 0], seq=[9])
    assert empty.tail_rows == 0
    with pytest.raises(ValueError, match=r"^cu_seqlens_q\[-1\]: got 0, supported by tail: at least 1 query"):
        empty.tail(1)


# --- files ---


@given(
    indices=hnp.arrays(
        np.int32,
        hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=6),
        elements=st.one_of(st.integers(-1, 40), st.integers(-(2**31), 2**31 - 1)),
    ),
    data=st.data(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory, indices: np.ndarray, data: st.DataObject
) -> None:
    rows = indices.shape[1]
    cut = data.draw(st.integers(0, rows))
    selections = [
        make(
            "one",
            indices,
            [0, cut, rows],
            [cut + 5, rows - cut],
            data.draw(st.sampled_from([64, 128])),
            layer=1,
        ),
        make("two.L1.h0", indices[:, :1], [0, 1], [77], layer=2, text="other"),
    ]
    path = tmp_path_factory.mktemp("selections") / "s.safetensors"
    save_selections(path, selections, {"text": "shared", "source_model": "m"})
    loaded = load_selections(path)
    assert [s.name for s in loaded] == ["one", "two.L1.h0"]
    for before, after in zip(selections, loaded, strict=True):
        np.testing.assert_array_equal(before.q2k_indices, after.q2k_indices)
        assert before.sha256 == after.sha256 and before.page_size == after.page_size
    assert loaded[0].metadata == {"text": "shared", "source_model": "m", "layer": 1}
    assert loaded[1].metadata == {"text": "other", "source_model": "m", "layer": 2}
    assert load_selections(path, ["two.L1.h0"])[0].sha256 == selections[1].sha256


@pytest.mark.parametrize(
    "extreme, dtype",
    [
        (2**15 - 1, np.int16),
        (2**15, np.int32),
        (-(2**15), np.int16),
        (-(2**15) - 1, np.int32),
        (-1, np.int16),
    ],
)
def test_ids_are_stored_as_small_as_they_fit(tmp_path: Path, extreme: int, dtype: type) -> None:
    path = tmp_path / "s.safetensors"
    save_selections(path, [make(indices=[[extreme, 0]] * 3)])
    assert load_file(path)["a"].dtype == dtype
    assert load_selections(path)[0].q2k_indices[0, 0, 0] == extreme


def test_header_is_as_documented(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    selection = make(cu=[0, 0, 3], seq=[5, 300], layer=7)
    save_selections(path, [selection], {"source_model": "m"})
    with safe_open(path, framework="numpy") as stream:
        header = json.loads(stream.metadata()["pageweaver"])
    assert header == {
        "format": FORMAT_NAME,
        "version": 1,
        "metadata": {"source_model": "m"},
        "selections": [
            {
                "name": "a",
                "sha256": selection.sha256,
                "page_size": 128,
                "cu_seqlens_q": [0, 0, 3],
                "seqused_k": [5, 300],
                "positions": [None, [297, 299]],
                "metadata": {"layer": 7},
            }
        ],
    }


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_selections(tmp_path / name, [make("b"), make("a")], {"k": 1, "j": 2})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_changed_ids_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_selections(path, [make()])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"selection 'a' has SHA-256 .* changed or damaged"):
        load_selections(path)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(FileNotFoundError, match=r"path: got .*, supported: an existing selection file"):
        load_selections(path)
    save_selections(path, [make()])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(
        ValueError, match=r"path: got .*, supported: a selection file .this is no safetensors"
    ):
        load_selections(path)
    path.write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"path: got .*, supported: a selection file .this is no safetensors"
    ):
        load_selections(path)
    save_file({"a": np.zeros(3, np.int16)}, path)
    with pytest.raises(ValueError, match="lacks the header"):
        load_selections(path)
    header = {"format": FORMAT_NAME, "version": 2, "metadata": {}, "selections": []}
    save_file({"a": np.zeros(3, np.int16)}, path, metadata={"pageweaver": json.dumps(header)})
    with pytest.raises(ValueError, match=r"version 2, supported: .* 1"):
        load_selections(path)
    header["version"] = 1
    entry = {
        "name": "a",
        "page_size": 2**70,
        "cu_seqlens_q": [0, 3],
        "seqused_k": [3],
        "metadata": {},
        "sha256": "",
    }
    for entries in ([], None, {}, [3], [entry, entry], [entry]):
        damaged = json.dumps({**header, "selections": entries})
        save_file({"a": np.zeros((1, 3, 1), np.int16)}, path, metadata={"pageweaver": damaged})
        with pytest.raises(ValueError, match=r"header is damaged|page_size: got"):
            load_selections(path)


def test_save_refuses_what_it_cannot_store(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(ValueError, match="selections: got none"):
        save_selections(path, [])
    with pytest.raises(ValueError, match="two named 'a'"):
        save_selections(path, [make(), make()])
    with pytest.raises(TypeError, match="selections: got str"):
        save_selections(path, ["a"])  # type: ignore[list-item]
    for value in (object(), float("nan")):
        with pytest.raises(TypeError, match="metadata: got what JSON cannot hold"):
            save_selections(path, [make()], {"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["[]", "NaN", "-1", "1.5", "true", '"4"', "2147483648"])
@pytest.mark.parametrize("name", ["layer", "kv_head"])
def test_layers_and_heads_are_numbers(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_selections(path, [make()])
    with safe_open(path, framework="numpy") as stream:
        header = stream.metadata()["pageweaver"]
    damaged = header.replace('"metadata":{', f'"metadata":{{"{name}":{value},', 1).replace(",}", "}")
    save_file({"a": make().q2k_indices}, path, metadata={"pageweaver": damaged})
    message = re.escape(f"{path}, metadata of 'a': got {name} ")
    with pytest.raises(ValueError, match=rf"^{message}.*, supported: an int from 0 to 2147483647, or none$"):
        load_selections(path)
    if value != "NaN":
        with pytest.raises(ValueError, match=f"^metadata of 'a': got {name} "):
            save_selections(path, [make(**{name: json.loads(value)})])


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "s.safetensors"
    save_selections(path, [make("old")])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, failing, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_selections(path, [make("new")])
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]
    assert load_selections(path)[0].name == "old"


def test_atomic_write_needs_the_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write_bytes(tmp_path / "missing" / "x", b"1")


def test_resolve_selection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_selections("s.safetensors", [make("a.L0.h1"), make("b")])
    assert [s.name for s in resolve_selection("s.safetensors")] == ["a.L0.h1", "b"]
    assert [s.name for s in resolve_selection("s.safetensors:b")] == ["b"]
    assert [s.name for s in resolve_selection("synthetic:low")] == ["synthetic.low"]
    with pytest.raises(ValueError, match=r"names: got 'c', supported by s.safetensors: a.L0.h1, b"):
        resolve_selection("s.safetensors:c")
    with pytest.raises(ValueError, match=r"got 'synthetic:huge', supported: synthetic:low\|mid"):
        resolve_selection("synthetic:huge")
    for spec in ("t.safetensors", "t.safetensors:b", "low", ""):
        with pytest.raises(FileNotFoundError, match=r"FILE.safetensors:NAME"):
            resolve_selection(spec)
    with pytest.raises(TypeError, match="selection: got int"):
        resolve_selection(3)  # type: ignore[arg-type]


# --- conversion and the committed capture ---


def test_parse_capture_name() -> None:
    assert parse_capture_name("austen-a.L18.h2") == {"text_id": "austen-a", "layer": 18, "kv_head": 2}
    for name in ("low", "a.L1", "a.Lx.h2", ".L1.h2"):
        with pytest.raises(ValueError, match=r"TEXT.Llayer.hkv_head"):
            parse_capture_name(name)


def test_convert_npz(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {n: rng.integers(0, 504, (40, 16)).astype(np.int16) for n in ("t.L3.h1", "t.L0.h2", "low")}
    np.savez(tmp_path / "in.npz", **arrays)
    out = tmp_path / "out.safetensors"
    converted = convert_npz(tmp_path / "in.npz", out, ["t.L0.h2", "t.L3.h1"])
    assert [s.name for s in load_selections(out)] == ["t.L0.h2", "t.L3.h1"]
    np.testing.assert_array_equal(converted[1].q2k_indices[0], arrays["t.L3.h1"])
    assert converted[1].metadata["layer"] == 3 and converted[1].metadata["kind"] == "captured"
    assert converted[0].positions[-1] == 64423
    synthetic = convert_npz(tmp_path / "in.npz", out, ["low"])[0]
    assert synthetic.name == "synthetic.low" and synthetic.metadata["kind"] == "synthetic"
    with pytest.raises(ValueError, match="one kind"):
        convert_npz(tmp_path / "in.npz", out)
    with pytest.raises(ValueError, match="names: got 'mid'"):
        convert_npz(tmp_path / "in.npz", out, ["mid"])
    np.savez(tmp_path / "bad.npz", low=np.zeros((2, 3, 4), np.int16))
    with pytest.raises(ValueError, match=r"low: got \(2, 3, 4\)"):
        convert_npz(tmp_path / "bad.npz", out)


def test_committed_capture() -> None:
    assert COMMITTED.stat().st_size <= 1_500_000
    selections = load_selections(COMMITTED)
    measured = {s.name: round(reuse(s), 2) for s in selections}
    assert measured == {"austen-a.L18.h2": 1.49, "austen-a.L4.h0": 3.80, "austen-a.L4.h1": 5.43}
    for selection in selections:
        assert selection.q2k_indices.shape == (1, 15272, 16) and selection.page_size == 128
        assert selection.positions[[0, -1]].tolist() == [49152, 64423]
        ids = selection.q2k_indices[0]
        assert (np.diff(ids, axis=1) > 0).all() and ids.min() >= 0
        local = selection.positions // 128
        assert (ids <= local[:, None]).all() and (ids == local[:, None]).any(axis=1).all()
        assert {"source_model", "weights", "text", "rule", "rope", "limits", "layer", "kv_head"} <= set(
            selection.metadata
        )


def test_readme_table_is_true() -> None:
    readme = (CAPTURES / "README.md").read_text()
    for selection in load_selections(COMMITTED):
        edges = int((selection.q2k_indices >= 0).sum())
        ratio = reuse(selection)
        assert f"| `{selection.name}` | {ratio:.2f} | {round(edges / ratio):,} |" in readme
