"""Secrets that were written into a spec: found by how they look or by the name they stand under, and never shown."""

import itertools
import re

# How the issuers mark what they hand out. Each needs enough of a tail to be the thing itself and not talk about it.
# Repetitions that something has to follow are bounded, so that no text makes the search slow.
_MARKED = re.compile(
    r"""(?<![A-Za-z0-9])(?:
        hf_[A-Za-z0-9]{16,}                             # Hugging Face
      | sk-(?=[A-Za-z0-9_-]{0,200}[0-9])[A-Za-z0-9_-]{16,}    # OpenAI and those who do as it does
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_\w{20,} # GitHub
      | glpat-[A-Za-z0-9_-]{16,}                        # GitLab
      | xox[abprs]-[A-Za-z0-9-]{10,}                    # Slack
      | nvapi-[A-Za-z0-9_-]{20,}                        # NVIDIA
      | A(?:KI|SI)A[A-Z0-9]{16}                         # AWS
      | eyJ[A-Za-z0-9_-]{10,2000}\.eyJ[A-Za-z0-9_-]{10}  # a JSON web token
    )
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY
    | [a-z][a-z0-9+.-]{1,15}://[^/\s:@]*:[^/\s@]+@      # a URL with a password
    """,
    re.VERBOSE | re.ASCII,
)
_OPAQUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=.-]{16,}", re.ASCII)


def looks_like_secret(text: str) -> bool:
    """Say whether a text carries the mark of a secret, whatever it stands under."""
    return _MARKED.search(text) is not None


def without_secrets(text: str, given: bytes = b"") -> str:
    """Return the text without what carries the mark of a secret, and without opaque words of what was *given*.

    *given* is data that a script got, and that may have come back in what the script said.
    """
    text = _MARKED.sub("[withheld]", text)
    words = frozenset(_OPAQUE_WORD.findall(given.decode("utf-8", "replace")))
    return _OPAQUE_WORD.sub(lambda word: "[withheld]" if word[0] in words else word[0], text) if words else text


_OPAQUE_WORD = re.compile(r"(?<![A-Za-z0-9_-])(?=[A-Za-z_-]*[0-9])(?=[0-9_-]*[A-Za-z])[A-Za-z0-9_-]{16,}", re.ASCII)
_BLOB = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+=]{24,}", re.ASCII)
_SECRET_WORDS = frozenset(
    ("token", "secret", "secrets", "password", "passwd", "passphrase", "apikey", "credential", "credentials")
)
_KINDS_OF_KEY = frozenset(("api", "access", "private", "secret", "auth", "account"))
_ALWAYS = frozenset(("password", "passwd", "passphrase", "apikey", "api_key"))


def _words(key: str) -> list[str]:
    """Split a name into words, with api_key and its like as one."""
    words = re.split(r"[^a-z0-9]+", key.casefold())
    joined = [f"{a}_{b}" for a, b in itertools.pairwise(words) if b == "key" and a in _KINDS_OF_KEY]
    return words + joined


def names_secret(key: str) -> bool:
    """Say whether what stands under this name is a secret by its name: ``api_key``, ``HF_TOKEN``, ``password``."""
    return any(word in _SECRET_WORDS or word.endswith("_key") for word in _words(key))


def is_literal(key: str, value: str) -> bool:
    """Say whether *value* under *key* is a secret written out.

    A path, a URL without a password and a short word are not, even under a name like ``HF_TOKEN_PATH`` or
    ``stop-token``: a secret is long and opaque. A password need not be, so anything under that name is one.
    """
    if looks_like_secret(value):
        return True
    if not value or not names_secret(key) or value.startswith(("/", "./", "~")) or "://" in value:
        return False
    return not _ALWAYS.isdisjoint(_words(key)) or _OPAQUE.fullmatch(value) is not None


def is_literal_name(name: str) -> bool:
    """Say whether a secret itself stands where its name belongs: names are words, secrets are not."""
    return looks_like_secret(name) or _BLOB.fullmatch(name) is not None
