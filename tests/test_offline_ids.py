"""Searched ids: what they are bound to, and how they are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import pageweaver as pw
from pageweaver.common.captures import save_selections
from pageweaver.strategies.query_union import Union8
from pageweaver.strategies.regroup.offline import FORMAT

from .helpers import random_problem, replaced, selection_of


class TestOfflineIds:
    def test_another_selection(self) -> None:
        problem = random_problem()
        ids = pw.search(selection_of(problem), window=512)
        strategy = pw.load("offline_w512", ids=ids)
        strategy(problem)
        changed = problem.q2k_indices.clone()
        changed[0, 4, 1] = 2
        moved = problem.seqused_k.clone()
        moved[0] += 1
        for other in (replaced(problem, q2k_indices=changed), replaced(problem, seqused_k=moved)):
            with pytest.raises(
                ValueError, match=r"ids\.selection_sha256: got [0-9a-f]{64}, supported: [0-9a-f]{64}"
            ):
                strategy(other)

    def test_another_window_or_group(self) -> None:
        problem = random_problem(group_size=8)
        selection = selection_of(problem)
        with pytest.raises(ValueError, match=r"ids\.window: got 512, supported by offline_w2048: 2048"):
            pw.load("offline_w2048", ids=pw.search(selection, window=512))
        ids = pw.search(selection, window=512, group_size=16)
        with pytest.raises(ValueError, match=r"ids\.queries_per_group: got 8, supported: 16 at group size 8"):
            pw.load("offline_w512", ids=ids)(problem)
        with pytest.raises(TypeError, match=r"ids: got NoneType, supported by offline_w512: OfflineIds from"):
            pw.load("offline_w512")

    def test_damaged(self) -> None:
        """The hash vouches for the selection, not for the ids."""
        problem = random_problem()
        ids = pw.search(selection_of(problem), window=512)
        for damage in (ids.query_ids[:, :-1], ids.query_ids * 0, ids.query_ids[:, ::-1]):
            damaged = dataclasses.replace(ids, query_ids=damage)
            with pytest.raises(ValueError, match=r"query_ids"):
                pw.load("offline_w512", ids=damaged)(problem)

    def test_saved_and_loaded(self, tmp_path: Path) -> None:
        problem = random_problem(num_kv_heads=2, group_size=8)
        ids = pw.search(selection_of(problem), window=512, group_size=8, objective="rounds")
        path = tmp_path / "ids.safetensors"
        ids.save(path)
        loaded = pw.OfflineIds.load(path)
        assert (loaded.query_ids == ids.query_ids).all()
        for name in ("selection_sha256", "window", "queries_per_group", "objective"):
            assert getattr(loaded, name) == getattr(ids, name)
        expected = Union8()(problem)
        assert torch.equal(pw.load("offline_w512", ids=loaded)(problem), expected)
        assert [p.name for p in tmp_path.iterdir()] == ["ids.safetensors"]

    def test_not_a_file_of_ids(self, tmp_path: Path) -> None:
        selections = tmp_path / "selections.safetensors"
        save_selections(selections, [selection_of(random_problem())], {})
        garbage = tmp_path / "garbage.safetensors"
        garbage.write_bytes(b"not a file")
        bare = tmp_path / "bare.safetensors"
        safetensors.numpy.save_file({"query_ids": np.zeros((1, 2), dtype=np.int32)}, bare)
        truncated, odd_header, no_ids, wrong_json = (tmp_path / f"{n}.safetensors" for n in "abcd")
        ids = pw.search(selection_of(random_problem()), window=512)
        ids.save(truncated)
        truncated.write_bytes(truncated.read_bytes()[:-8])
        good = {"selection_sha256": "", "window": 1, "queries_per_group": 8, "objective": "visits"}
        for path, tensor, header in (
            (odd_header, "query_ids", json.dumps({"format": FORMAT, "more": 1})),
            (no_ids, "ids", json.dumps(good | {"format": FORMAT})),
            (wrong_json, "query_ids", "{"),
        ):
            content = {tensor: np.zeros((1, 2), dtype=np.int32)}
            safetensors.numpy.save_file(content, path, {"pageweaver": header})
        for path in (selections, garbage, bare, truncated, odd_header, no_ids, wrong_json):
            with pytest.raises(ValueError, match=rf"path: got '{path}', supported: "):
                pw.OfflineIds.load(path)
        with pytest.raises(FileNotFoundError):
            pw.OfflineIds.load(tmp_path / "missing.safetensors")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"window": 0}, r"window: got 0, supported: a positive integer"),
            ({"window": 2.5}, r"window: got 2\.5, supported: a positive integer"),
            ({"objective": "reuse"}, r"objective: got 'reuse', supported: \('visits', 'rounds'\)"),
            ({"group_size": 3}, r"group_size: got 3, supported: \(1, 2, 4, 8, 16\)"),
        ],
    )
    def test_search_refuses(self, change: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            pw.search(selection_of(random_problem()), **change)

    def test_progress(self) -> None:
        seen: list[float] = []
        pw.search(selection_of(random_problem(num_kv_heads=4, group_size=4)), progress=seen.append)
        assert seen == [0.25, 0.5, 0.75, 1.0]
