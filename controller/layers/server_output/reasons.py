"""What can be wrong with what a server says."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The closed list."""

    NOT_MEASURED = "not-measured"
    """This run of it, with these files, has not been asked yet."""
    WRONG_OUTPUT = "wrong-output"
    """It answered wrong, badly, or not at all."""
    TOO_SLOW = "too-slow"
    """It generates fewer tokens a second than the spec asks for."""
    TOO_FAST = "too-fast"
    """It generates more tokens a second than the spec believes: repetition is the fastest text there is."""
    SLOWER_THAN_BEFORE = "slower-than-before"
    """It generates far fewer tokens a second than it used to with the same files."""
    DRAFTS_REFUSED = "drafts-refused"
    """Fewer drafted tokens are accepted than the spec asks for."""
    DRAFTS_TOO_GOOD = "drafts-too-good"
    """More drafted tokens are accepted than the spec believes."""
    NO_DRAFTS = "no-drafts"
    """The spec bounds the acceptance of drafts, and the engine counts none."""
    ENDS = "ends"
    """It ends as it starts, or again and again, and there is a good one to go back to."""
    NOT_READY = "not-ready"
    """It is not ready in time, and there is a good one to go back to."""
    INCONCLUSIVE = "inconclusive"
    """It could not be judged: it was too busy to be asked, or a check's control did not fail."""
    ROLLED_BACK = "rolled-back"
    """What the spec asks for failed its checks; the last good one serves in its place."""
