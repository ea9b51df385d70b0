"""Quotes a stranger's text as a short code span of printable ASCII, without further markup."""

import re

SHOWN_MAX_CHARS = 80
# Backquotes would end the code span, and angle brackets could pass for the marker of an answer; everything else stays,
# so that people recognize what they wrote.
UNSAFE = re.compile(r"[^\x20-\x7e]|[`<>]")


def quoted(text: str) -> str:
    """Return the text as a Markdown code span; other characters become `?`, and long texts are cut."""
    shown = UNSAFE.sub("?", text[:SHOWN_MAX_CHARS]).strip()
    return f"`{shown or '(empty)'}{'...' if len(text) > SHOWN_MAX_CHARS else ''}`"
