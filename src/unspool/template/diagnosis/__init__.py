"""The doctor: what a chat template does to a rollout, found out by rendering, bridging and parsing with it.

Each finding has a level, a code that stays, and the way out. Nothing is sampled and no model is needed.
"""

from __future__ import annotations

from unspool.template.diagnosis.examination import doctor
from unspool.template.diagnosis.findings import Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "doctor"]
