"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# A shared, slow or busy machine must not fail a property by its clock.
settings.register_profile("pageweaver", deadline=None, print_blob=True)
settings.load_profile("pageweaver")
