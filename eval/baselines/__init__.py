"""What others run, as arms of the same measurements; each says its arithmetic, and what a call leaves out.

`BASELINES` names them. One whose package is missing refuses with `UnsupportedDeviceError`, and a measurement
of many arms then names it as not run. Caches lie as each wants them before a call begins: an engine keeps its
cache in its kernel's layout, so laying it out is no part of a call.
"""

from __future__ import annotations

from collections.abc import Mapping

from pageweaver.eval.baselines.base import Baseline
from pageweaver.eval.baselines.dense import Dense
from pageweaver.eval.baselines.engines import FlashInferMsa, SglangM3, VllmM3
from pageweaver.eval.baselines.flex import Flex

BASELINES: Mapping[str, type[Baseline]] = {
    kind.name: kind for kind in (Dense, Flex, FlashInferMsa, SglangM3, VllmM3)
}

__all__ = ["BASELINES", "Baseline"]
