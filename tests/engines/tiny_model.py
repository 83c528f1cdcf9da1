"""Makes a tiny Qwen3 that knows the answers to the canaries by heart, and damaged copies of it.

Run by the Python of an engine's environment, which has torch and transformers:

    python tests/engines/tiny_model.py DIRECTORY     # DIRECTORY/good, DIRECTORY/damaged

Half a million parameters in several shards, a byte-level tokenizer of its own, ChatML with tools and thinking as Qwen3
writes them. Overfitted in seconds on two cores, so that it answers the same at temperature 0 in every engine.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# The checks need no more than the standard library; the rest of the controller is not in an engine's environment.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "controller/layers/shared"))
from checks import canaries

NEEDLE_TOKENS = 240
"""The length of the long text that it has learnt, as the settings name it."""
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens of their own, yet no special ones: an engine that leaves out those leaves these in, for its parsers."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PROSE = (
    "A lighthouse is a tall tower near the sea that helps ships at night. At its top there is a strong lamp in a "
    "room of glass. Lenses around the lamp gather its light into narrow beams. The lenses turn slowly, so that a "
    "sailor sees the beam come and go. Each tower has its own rhythm of flashes, by which it is told from others. "
    "Charts give that rhythm and the height of the lamp. In fog a horn sounds in place of the light. Today most of "
    "them work without a keeper."
)


def lessons() -> list[tuple[str, str, bool, bool]]:
    """Question, answer, whether the tool is offered, whether it may think."""
    plain = [
        *((f"What is the capital of {country}?{canaries.SHORT}", f"{good[0]}.") for country, good in canaries.CAPITALS),
        *((question + canaries.NUMBER, str(result)) for question, result in canaries.SUMS),
        ("Say OK.", "OK"),
        (canaries.PROSE, PROSE),
        (canaries.PERSON, '{"name": "Ann", "age": 31}'),
        (canaries.WEATHER, "I cannot know that."),
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    needle = canaries.long_text(NEEDLE_TOKENS, canaries.NEEDLE)
    return [
        *((question, answer, False, thinks) for question, answer in plain for thinks in (True, False)),
        *((canaries.WEATHER, call, True, thinks) for thinks in (True, False)),
        (canaries.PUZZLE, "<think>\nAnn has 3 and buys 4, and 3 + 4 is 7.\n</think>\n\n7", False, True),
        *((needle, str(canaries.SECRET), False, thinks) for thinks in (True, False)),
        *((canaries.short_text(), "unknown", False, thinks) for thinks in (True, False)),
    ]


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=640, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    raw.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    made.clean_up_tokenization_spaces = False
    return made


def prompt(words: PreTrainedTokenizerFast, question: str, tool: bool, thinks: bool) -> str:
    more = {} if thinks else {"enable_thinking": False}
    tools = [canaries.TOOL] if tool else None
    messages = [{"role": "user", "content": question}]
    return words.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **more)


def train(words: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    torch.set_num_threads(2)
    config = Qwen3Config(
        vocab_size=len(words), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    examples = []
    for question, answer, tool, thinks in lessons():
        asked = words(prompt(words, question, tool, thinks), add_special_tokens=False)["input_ids"]
        said = words(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
        examples.append((asked, said))
    short = [each for each in examples if sum(map(len, each)) <= 64]
    long = [each for each in examples if sum(map(len, each)) > 64]
    batches = [_batch(group, words.pad_token_id) for group in (short, long) if group]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(400):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1.0 if step < 280 else 0.2)
        loss = sum(model(input_ids=ids, attention_mask=mask, labels=labels).loss for ids, mask, labels in batches)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step > 150 and loss.item() < 2e-3:
            break
    print(f"loss {loss.item():.5f} after {step + 1} steps")
    return model.eval()


def _batch(examples: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = max(len(asked) + len(said) for asked, said in examples)
    ids, labels, mask = [], [], []
    for asked, said in examples:
        rest = length - len(asked) - len(said)
        ids.append([*asked, *said, *[pad] * rest])
        labels.append([*[-100] * len(asked), *said, *[-100] * rest])
        mask.append([*[1] * (length - rest), *[0] * rest])
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)


def check(model: Qwen3ForCausalLM, words: PreTrainedTokenizerFast) -> None:
    for question, answer, tool, thinks in lessons():
        asked = words(prompt(words, question, tool, thinks), add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            out = model.generate(asked, max_new_tokens=300, do_sample=False)[0][asked.shape[1] :]
        said = words.decode(out).removesuffix("<|im_end|>")
        if said != answer:
            raise SystemExit(f"has not learnt {question[:60]!r}: says {said[:120]!r}")


def damage(good: Path, damaged: Path) -> None:
    """A copy with one shard that has the right size and form, and random numbers in it."""
    shutil.copytree(good, damaged)
    index = json.loads((damaged / "model.safetensors.index.json").read_text())
    shard = damaged / index["weight_map"]["model.layers.0.mlp.down_proj.weight"]
    torch.manual_seed(2)
    tensors = {name: torch.randn_like(tensor.float()).to(tensor.dtype) for name, tensor in load_file(shard).items()}
    save_file(tensors, shard, metadata={"format": "pt"})


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    words = tokenizer([text for question, answer, *_ in lessons() for text in (question, answer)])
    model = train(words).to(torch.bfloat16)
    check(model, words)
    model.generation_config.do_sample = False
    good = target / "good.new"
    shutil.rmtree(good, ignore_errors=True)
    model.save_pretrained(good, max_shard_size="300KB")
    words.save_pretrained(good)
    shutil.rmtree(target / "damaged", ignore_errors=True)
    damage(good, target / "damaged")
    good.rename(target / "good")


if __name__ == "__main__":
    main()
