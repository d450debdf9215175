"""Regrouping by page affinity: online (every call) and offline (ids searched ahead)."""

from pageweaver.strategies.regroup.offline import OfflineIds, OfflineW512, OfflineW2048, search
from pageweaver.strategies.regroup.online import Auto, RegroupW64, RegroupW128

__all__ = ["Auto", "OfflineIds", "OfflineW512", "OfflineW2048", "RegroupW64", "RegroupW128", "search"]
