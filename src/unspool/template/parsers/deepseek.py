"""DeepSeek V3, R1 and V3.1: a name and a JSON object between marks, the object in a fence or not.

V3 and R1 write the kind of call before the name, and fence the object as a code block:

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>name
    ```json
    {...}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, without line breaks. What stands behind
the separator tells the two apart, so both are read whichever the template is.
"""

from __future__ import annotations

import re

from unspool.template.parsers.sections import Head, Marks, SectionParser

SEPARATOR = "<｜tool▁sep｜>"
MARKS = Marks("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")

_HEAD = re.compile(rf"\s*+([^<>\s]*+)\s*+{re.escape(SEPARATOR)}")
_NAME = re.compile(r"\s*+([^\s<>{}\[\]\"`]++)")
_FENCE = re.compile(r"\s*+(?:```(?:json|j?s?o?\Z)?+|`{1,2}+\Z)")  # the text may be cut within it


def _head(text: str, at: int) -> Head:
    kind = _HEAD.match(text, at)
    if kind is None:
        return Head("", at, error=f"expected a name and {SEPARATOR} behind {MARKS.call}")
    behind = _NAME.match(text, kind.end())
    name, begun = (behind.group(1), behind.end()) if behind else (kind.group(1), kind.end())
    if behind and begun == len(text):
        name = ""  # cut off, perhaps in the name
    elif not name:
        return Head("", begun, error="the name of the call is missing")
    fence = _FENCE.match(text, begun)
    return Head(name, fence.end() if fence else begun)


DEEPSEEK = SectionParser("deepseek", MARKS, _head)
