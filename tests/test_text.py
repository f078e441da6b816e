"""Text that is written token by token is the text that is decoded at once, whatever the tokenizer.

The tokenizers cover what decodes differently: a Unigram with spaces in its pieces (T5), raw bytes
(ByT5), byte fallback (one piece per byte of a rare character), byte-level BPE (CodeT5, RoBERTa).
"""

import io
import random
import statistics
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from text import TextStream  # noqa: E402

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "It's 3.14 , isn't it ? No : ( it is n't ) ...",  # a clean-up would eat spaces here
    "naïve café, Straße, Ωμέγα, Жар-птица",
    "👍 thumbs 👩‍👩‍👧 family 🏳️‍🌈 flag",
    "日本語のテキストです。空白はありません。",
    "مرحبا بالعالم שלום עולם",
    "two  spaces   three, a\ttab\nand lines\n\nend ",
    " leading space",
    "�",
    "a�b��",
    "a",
]


def t5():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ROOT / "demo" / "t5-demo")


def byt5():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def unigram(byte_fallback):
    """A SentencePiece model of a few pieces, as transformers would read it from T5's folder."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox", "it is not the lazy dog", "a lazy fox"] * 9),
        model_writer=model,
        vocab_size=300 if byte_fallback else 40,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(len(pieces))]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    sentinels = [f"<extra_id_{i}>" for i in range(3)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="</s>",
        additional_special_tokens=sentinels,
    )


def bpe():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", "<unk>", "<extra_id_0>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<extra_id_0>"],
        clean_up_tokenization_spaces=True,
    )


@pytest.fixture(scope="module", params=["t5", "byt5", "byte_fallback", "no_fallback", "bpe"])
def tokenizer(request):
    kind = request.param
    if kind.endswith("fallback"):
        return unigram(kind == "byte_fallback")
    return {"t5": t5, "byt5": byt5, "bpe": bpe}[kind]()


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pieces_of(tokenizer, ids, drafted=None):
    """What a TextStream gives for each token, and at the end."""
    stream = TextStream(tokenizer)
    drafted = drafted or [False] * len(ids)
    pieces = [stream.push(i, d) for i, d in zip(ids, drafted, strict=True)]
    return [*pieces, stream.finish()]


def text_of(pieces):
    return "".join(text for piece in pieces for text, _ in piece)


def test_texts(tokenizer):
    for text in [*TEXTS, " ".join(TEXTS), "".join(TEXTS * 4)]:
        ids = tokenizer(text).input_ids
        most = 12 if len(ids) < 300 else 2
        for end in range(max(0, len(ids) - most), len(ids) + 1):  # cut anywhere
            assert text_of(pieces_of(tokenizer, ids[:end])) == decode(tokenizer, ids[:end])


def test_random_ids(tokenizer):
    """Also sequences that no text gives: broken characters, special tokens anywhere."""
    rng = random.Random(1)
    every = sorted(tokenizer.get_vocab().values())
    letters = tokenizer("😀é日a b").input_ids
    pools = [every, letters, every[:260], every[-30:], letters[:3]]
    for _ in range(400):
        pool = rng.choice(pools)
        ids = [rng.choice(pool) for _ in range(rng.choice([1, 2, 3, 5, 9, 20, 60]))]
        assert text_of(pieces_of(tokenizer, ids)) == decode(tokenizer, ids), ids


def test_special_tokens_and_ids_beyond_the_tokenizer_are_not_printed(tokenizer):
    special = tokenizer.all_special_ids
    ids = tokenizer("the lazy dog", add_special_tokens=False).input_ids
    padding = [max(tokenizer.get_vocab().values()) + 20]
    mixed = [x for i in ids for x in (i, *special, *padding * 40)]
    assert text_of(pieces_of(tokenizer, mixed)) == decode(tokenizer, ids) == "the lazy dog"


def test_every_token_is_printed_at_once_where_nothing_can_change_it(tokenizer):
    """Plain words come with their last byte, a character with its last token."""
    ids = tokenizer("the quick dog", add_special_tokens=False).input_ids
    so_far = ""
    for i, piece in enumerate(pieces_of(tokenizer, ids)[:-1]):
        so_far += text_of([piece])
        assert so_far == decode(tokenizer, ids[: i + 1])


@pytest.mark.parametrize("make", [byt5, bpe])
def test_a_character_is_printed_when_it_is_complete_and_not_before(make):
    tokenizer = make()
    ids = tokenizer("x😀", add_special_tokens=False).input_ids
    pieces = [text_of([p]) for p in pieces_of(tokenizer, ids)]
    assert len(ids) > 2
    assert pieces == ["x", *[""] * (len(ids) - 2), "😀", ""]


def test_an_unfinished_character_is_printed_at_the_end():
    tokenizer = bpe()
    ids = tokenizer("x😀", add_special_tokens=False).input_ids[:-1]
    pieces = [text_of([p]) for p in pieces_of(tokenizer, ids)]
    assert pieces == ["x", *[""] * (len(ids) - 1), "�"]


def test_a_broken_byte_does_not_stop_the_text():
    """Only the last of many broken characters may still change; the others are printed."""
    tokenizer = bpe()
    byte = tokenizer("😀", add_special_tokens=False).input_ids[-1]
    pieces = [text_of([p]) for p in pieces_of(tokenizer, [byte] * 50)]
    assert pieces == ["", *["�"] * 50]


def test_a_run_of_byte_fallback_waits_for_its_end():
    """One bad byte spoils all characters of its run, also those that looked complete."""
    tokenizer = unigram(True)
    ids = tokenizer("é the", add_special_tokens=False).input_ids
    e = [tokenizer.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "é".encode()]
    start = ids.index(e[0])
    assert ids[start : start + 2] == e
    good, bad = ids, [*ids[: start + 2], e[0], *ids[start + 2 :]]
    assert text_of(pieces_of(tokenizer, good)) == "é the"
    assert text_of(pieces_of(tokenizer, bad)) == decode(tokenizer, bad) == "��� the"


def marked(tokenizer, ids, drafted):
    """Each character with its mark."""
    pieces = [mark for piece in pieces_of(tokenizer, ids, drafted) for mark in piece]
    assert "".join(t for t, _ in pieces) == decode(tokenizer, ids)
    return [(c, d) for text, d in pieces for c in text]


def test_marks_of_whole_tokens(tokenizer):
    """Where tokens are whole characters, a character is marked as the token that brought it."""
    ids = tokenizer("the quick brown fox is lazy", add_special_tokens=False).input_ids
    rng = random.Random(2)
    for _ in range(50):
        drafted = [rng.random() < 0.5 for _ in ids]
        expected = []
        for i, mark in enumerate(drafted):
            new = decode(tokenizer, ids[: i + 1])[len(expected) :]
            expected += [(c, mark) for c in new]
        assert marked(tokenizer, ids, drafted) == expected


def naive_marks(tokens, flags):
    """tokens: the bytes of each -> characters, drafted if every token with a byte of them is."""
    owners = [i for i, token in enumerate(tokens) for _ in token]
    marks, at = [], 0
    for c in b"".join(tokens).decode():
        size = len(c.encode())
        marks.append((c, all(flags[i] for i in owners[at : at + size])))
        at += size
    return marks


def byte_characters():
    """The printable character that byte-level BPE writes for each byte (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return "".join(chr(b if b in printable else next(others)) for b in range(256))


BYTE_CHARACTERS = byte_characters()


def token_bytes(tokenizer, ids):
    """What each token stands for in UTF-8."""
    result = []
    for token in tokenizer.convert_ids_to_tokens(ids):
        if not tokenizer.is_fast:
            result.append(token.encode("latin-1"))
        elif "<extra_id_2>" in tokenizer.get_vocab():  # the SentencePiece one
            byte = token.startswith("<0x")
            text = token.replace("▁", " ").encode()
            result.append(bytes([int(token[3:5], 16)]) if byte else text)
        else:
            result.append(bytes(BYTE_CHARACTERS.index(c) for c in token))
    return result


@pytest.mark.parametrize("kind", ["byt5", "bpe", "byte_fallback"])
def test_a_character_of_several_tokens_is_marked_when_all_of_them_were_drafted(kind):
    tokenizer = {"byt5": byt5, "bpe": bpe, "byte_fallback": lambda: unigram(True)}[kind]()
    rng = random.Random(3)
    for text in ["x😀é the 日本 y", "😀😀", "aé日😀", "日本語のテキスト the 👍"]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        tokens = token_bytes(tokenizer, ids)
        for _ in range(60):
            flags = [rng.random() < 0.6 for _ in ids]
            expected = naive_marks(tokens, flags)
            if expected[0][0] == " ":  # SentencePiece's first space is not text
                expected = expected[1:]
            assert marked(tokenizer, ids, flags) == expected, (text, flags)


def test_a_token_that_ends_one_character_and_begins_another():
    """Byte-level BPE may merge so; a character is marked only if both its tokens were drafted."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    def name(data):
        return "".join(BYTE_CHARACTERS[b] for b in data)

    a, b = "é".encode()
    tokens = [bytes([a]), bytes([b, a]), bytes([b]), b"x"]
    vocab = {name(t): i for i, t in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    for n in range(16):
        flags = [bool(n & 1 << i) for i in range(4)]
        first, second = flags[0] and flags[1], flags[1] and flags[2]
        expected = [("é", first), ("é", second), ("x", flags[3])]
        assert marked(tokenizer, [0, 1, 2, 3], flags) == expected


def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer):
    ids = tokenizer(" ".join(TEXTS) * 60).input_ids[:5000]
    ids = (ids * 5000)[:5000]
    stream, times = TextStream(tokenizer), []
    for i in ids:
        began = time.perf_counter()
        stream.push(i, i % 2 == 0)
        times.append(time.perf_counter() - began)
    assert statistics.median(times[-1000:]) < 3 * statistics.median(times[:1000]) + 1e-4
    assert sum(times) < 15
