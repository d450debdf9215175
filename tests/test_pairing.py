"""What page pairs are worth, on the selections that come with the repository."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from pageweaver.common.captures import Selection, resolve_selection
from pageweaver.common.problem import selection_support
from pageweaver.eval.output import default_captures
from pageweaver.strategies.page_union.pairing import incidence, propose_pairs

SELECTIONS = [*resolve_selection(default_captures()), *resolve_selection("synthetic:interleaved")]
# Greedy pairs save at least this share of what any matching can.
SAVED_SHARE = 0.95


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda selection: selection.name)
def test_pairs_save_nearly_what_the_best_matching_saves(selection: Selection) -> None:
    """An assignment of pages to pages bounds every matching: each of its pairs would count twice."""
    support = selection_support(selection).numpy()
    matrix, _ = incidence(support[0], support[0])
    overlaps = (matrix @ matrix.T).toarray().astype(np.int64)
    np.fill_diagonal(overlaps, 0)
    most = overlaps[linear_sum_assignment(overlaps, maximize=True)].sum() / 2
    partner = propose_pairs(matrix)
    page = np.flatnonzero(partner >= 0)
    assert (partner[partner[page]] == page).all()
    saved = overlaps[page, partner[page]].sum() / 2
    assert SAVED_SHARE * most <= saved <= most
