"""What is taken for a secret, and what is not."""

import pytest

from controller.spec.literals import is_literal, is_literal_name


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("anything", "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ"),
        ("command", "--token=hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ"),
        ("anything", "sk-proj-aBcDeFgH1234567890"),
        ("anything", "ghp_" + "a1" * 18),
        ("anything", "github_pat_" + "a1" * 18),
        ("anything", "glpat-aBcDeFgH12345678"),
        ("anything", "nvapi-aBcDeFgH12345678aBcDeFgH"),
        ("anything", "AKIAABCDEFGHIJKLMNOP"),
        ("anything", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc"),
        ("anything", "-----BEGIN OPENSSH PRIVATE KEY-----\nabc"),
        ("index_url", "https://me:word@pypi.example/simple"),
        ("HF_TOKEN", "abcdefgh12345678"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY1"),
        ("password", "short"),
        ("DB_PASSWORD", "short"),
        ("api-key", "short"),
        ("OPENAI_API_KEY", "short"),
    ],
)
def test_secret(key: str, value: str) -> None:
    assert is_literal(key, value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("revision", "0123456789abcdef0123456789abcdef01234567"),
        ("sha256", "0123456789abcdef" * 4),
        ("host_key", "SHA256:uNiVztksCsDhcc0u9e8BrrQXVUpKZIDTMczCvj3tD2s"),
        ("uuid", "GPU-8a05f1c2-6d3e-4f7b-9a10-2c54e8b7d901"),
        ("HF_TOKEN_PATH", "/run/credentials/hf_token_0123456789"),
        ("HF_HUB_ENABLE_HF_TRANSFER", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("max-total-tokens", "262144"),
        ("stop-token", "<|im_end|>"),
        ("eos-token", "endoftext"),
        ("tokenizer-path", "Qwen/Qwen3-8B-2507-tokenizer"),
        ("repo", "Qwen/Qwen3.6-27B"),
        ("name", "task-scheduler-sk-learn"),
        ("index_url", "https://pypi.example/simple"),
        ("proxy_jump", "me@jump.example.net:2222"),
        ("api_key", ""),
    ],
)
def test_no_secret(key: str, value: str) -> None:
    assert not is_literal(key, value)


def test_names_of_secrets() -> None:
    assert not any(map(is_literal_name, ("hf", "qwen3.6-27b-prod-api-key-2024", "/run/credentials/hf", "HF_TOKEN")))
    assert all(map(is_literal_name, ("9f8e7d6c5b4a39281706f5e4d3c2b1a0", "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ")))
