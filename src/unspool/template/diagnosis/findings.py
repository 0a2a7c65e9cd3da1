"""What the doctor says: findings, each with a level, a code that stays, and the way out where something is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

Level: TypeAlias = Literal["ok", "note", "broken"]
"""`ok`: as it should be. `note`: something is lost or unusual, and rollouts work. `broken`: a rollout needs it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at, in one or two words.
        level: `"ok"`, `"note"` or `"broken"`.
        code: a name for the finding that programs can rely on, such as `"no_tools"`.
        text: what was found. It may quote the template, so it is shown escaped.
        remedy: the way out, one sentence; None where nothing needs one.
    """

    check: str
    level: Level
    code: str
    text: str
    remedy: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that was found out about one tokenizer with one chat template.

    Attributes:
        name: the tokenizer's.
        findings: in the order of the checks.
        parser: name of the tool-call parser; None: there is none.
        stop_tokens: texts of the tokens that end a turn.
        switches: variables that the template reads beside the conversation.
        bridges: by scenario `"exact"`, `"differs"`, `"refused"` (there is no bridge) or `"no render"` (there is a
            bridge, and the template refuses the whole conversation) or `"not compared"` (no token in the render ends
            the model's turn, or the turn is not in it).
    """

    name: str
    findings: tuple[Finding, ...]
    parser: str | None = None
    stop_tokens: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    bridges: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing that a rollout needs is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings for which rollouts do not work."""
        return tuple(finding for finding in self.findings if finding.level == "broken")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """The findings that one should know of."""
        return tuple(finding for finding in self.findings if finding.level == "note")

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of all that is not `ok`, what is broken first."""
        return tuple(finding.code for finding in (*self.broken, *self.notes))

    @property
    def verdict(self) -> str:
        """One line: whether rollouts work, and if not, why."""
        if self.broken:
            return f"Not ready: {'; '.join(finding.text for finding in self.broken)}"
        count = len(self.notes)
        return "Ready for rollouts" + (f", with {count} note{'' if count == 1 else 's'}" if count else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the attributes, `ok` and `verdict`."""
        return {
            "name": self.name,
            "ok": self.ok,
            "verdict": self.verdict,
            "parser": self.parser,
            "stop_tokens": list(self.stop_tokens),
            "switches": list(self.switches),
            "bridges": dict(self.bridges),
            "findings": [asdict(finding) for finding in self.findings],
        }
