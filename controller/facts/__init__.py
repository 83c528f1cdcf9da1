"""The words for what was observed on hosts. Pure: no I/O, no clock."""
