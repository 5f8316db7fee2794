"""Small tokenizers of each kind, made on the spot: as a model directory has them."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hpcserve.tokens import TextTokenizer

END = "</s>"
CONTROL = ("<s>", END, "<|im_start|>", "<|im_end|>", "[TOOL_CALLS]")


def byte_level_backend(size: int = 320) -> Tokenizer:
    """Return a byte-level tokenizer as GPT-2's; the first tokens are control tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the weather is fine", 'a name: {"name": "value"}'] * 4, trainer)
    return backend


def byte_level() -> TextTokenizer:
    """Return the tokenizer of `byte_level_backend`, which ends texts with `</s>`."""
    backend = byte_level_backend()
    return TextTokenizer(backend, end_tokens=[backend.token_to_id(END)])


def sentence_piece() -> TextTokenizer:
    """Return a tokenizer as Llama 2's: marked spaces, and tokens for single bytes."""
    vocab = {"<unk>": 0, END: 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)} | {"\u2581": 258}
    for letter in "abcdefghijklmnopqrstuvwxyz":
        vocab[letter] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(END, special=True)])
    return TextTokenizer(backend, end_tokens=[1])
