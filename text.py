"""Text in, token ids out, and back: all that `main.py` knows about text."""

import math
import re

CONTEXT = 8  # tokens that one is decoded behind; a character has at most 4 bytes


def read_text(path):
    """The text of a file (-: standard input) without the line break at its end."""
    try:
        with open(0 if path == "-" else path, "rb", closefd=path != "-") as file:
            return file.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None


def encode(tokenizer, where, text):
    """Text -> its token ids, a list that ends with one EOS. ValueError where there is no text."""
    try:
        text.encode()
    except UnicodeError as error:
        raise ValueError(f"{where} is not Unicode text: {error}") from None
    try:
        ids = tokenizer(text, verbose=False).input_ids
    except Exception as error:  # whatever a tokenizer's files make of it
        raise ValueError(f"{where} cannot be encoded: {error or type(error).__name__}") from None
    while ids[-2:] == [tokenizer.eos_token_id] * 2:  # the text had its own
        ids.pop()
    if not set(ids) - set(tokenizer("").input_ids):
        raise ValueError(f"{where}: the text is empty")
    return ids


def with_one_end(model, tokenizer):
    """Both; ValueError where what ends a text for the tokenizer would not end the model's."""
    end, ends = tokenizer.eos_token_id, model.eos_ids
    if ends and end is not None and end not in ends:
        said = ", ".join(map(str, ends))
        raise ValueError(f"the tokenizer's eos_token_id is {end}, the model's {said}")
    return model, tokenizer


def encode_chat(tokenizer, where, text, system=None, template=True):
    """Text -> its token ids for a model of mlx-lm, as a user's message in the chat template where
    its tokenizer has one. ValueError where there is no text."""
    if not text.strip():
        raise ValueError(f"{where}: the text is empty")
    messages = [{"role": "system", "content": system}] * (system is not None)
    messages += [{"role": "user", "content": text}]
    template = template and tokenizer.has_chat_template
    try:
        if template:
            form = {"tokenize": False, "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(messages, **form)
        text.encode()
        return tokenizer.encode(text, add_special_tokens=not template)
    except Exception as error:  # a template may refuse a system message, for instance
        raise ValueError(f"{where} cannot be encoded: {error or type(error).__name__}") from None


def unknown(tokenizer, text):
    """The characters of the text that are lost on the model, in their order, each time they occur:
    they have no token, or count no more than a space, or nothing."""
    plain = [tokenizer.encode(around) for around in ("xx", "x x")]

    def is_lost(character):
        ids = tokenizer.encode(f"x{character}x")
        return character != " " and (
            getattr(tokenizer, "unk_token_id", None) in ids or ids in plain
        )

    lost = {character for character in set(text) if is_lost(character)}
    return [character for character in text if character in lost]


def unknown_line(tokenizer, lost):
    """The line that names at most ten of the lost characters; those that are but a space, last."""
    lacks, spaces = "does not know {} ({})", "takes {} for a space ({})"
    names: dict = {lacks: [], spaces: []}
    for character in dict.fromkeys(lost):
        is_space = tokenizer.encode(f"x{character}x") == tokenizer.encode("x x")
        names[spaces if is_space else lacks].append(character)
    said, room = [], 10
    for what, characters in names.items():
        told = ", ".join(map(repr, characters[:room])) or "others"
        told += f" and {len(characters) - room} others" * (len(characters) > room > 0)
        count = sum(map(lost.count, characters))
        said += [what.format(told, f"{count} times" if count > 1 else "once")] * bool(characters)
        room -= min(room, len(characters))
    return f"note: in the texts, the tokenizer {', '.join(said)}"


class TextStream:
    """Token ids in, printable text out, as early as it is certain.

    Decoding is not append-only: T5 drops the space before a piece that is decoded alone, and a
    character can take several tokens. So each token is decoded behind a few before it, and what it
    adds is printed, but for what a later token may change: an unfinished character (U+FFFD), a run
    of byte-fallback tokens (one bad byte spoils all of it). All pieces together are `_decode(ids)`.
    """

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        self._decode = lambda ids: tokenizer.decode(ids, **options)
        added = tokenizer.added_tokens_decoder
        self.special = {i for i, t in added.items() if t.special} | set(tokenizer.all_special_ids)
        # ByT5 would read an id that only pads the model's table as a byte beyond 255.
        self.size = math.inf if tokenizer.is_fast else len(tokenizer)
        self.ids, self.drafted = [], []  # a window: the context, then `fresh` tokens not printed
        self.fresh = self.printed = 0  # printed: how many of the window's characters are out

    def push(self, token_id, drafted=False):
        """The next token -> [(text, drafted)]: what can be printed now, maybe nothing."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id in self.special or token_id >= self.size:
            return []
        self.ids.append(token_id)
        self.drafted.append(drafted)
        self.fresh += 1
        return [] if re.fullmatch("<0x[0-9A-F]{2}>", token) else self._print(hold=True)

    def finish(self):
        """The text has ended -> [(text, drafted)]: the rest."""
        return self._print(hold=False) if self.fresh else []

    def _print(self, hold):
        text = self._decode(self.ids)
        end = len(text) - (hold and text.endswith("\ufffd"))
        pieces = self._mark(text, end)
        self.printed = end
        if len(self.ids) > 4 * CONTEXT:  # a token's cost must not grow with the text
            self.ids, self.drafted = self.ids[-CONTEXT:], self.drafted[-CONTEXT:]
            self.fresh = min(self.fresh, CONTEXT)
            self.printed = len(self._decode(self.ids)) - (len(text) - end)
        return pieces

    def _mark(self, text, end):
        """text[printed:end] as [(text, drafted)]; a character is drafted if all its tokens are."""
        first, done, marks = len(self.ids) - self.fresh, self.printed, []
        if len(set(self.drafted[first:])) == 1:
            # A token without text is silent (T5's first space) or, in ByT5, a character's first.
            if end == len(text) and (end > done or self.tokenizer.is_fast):
                self.fresh = 0
            return [(text[done:end], self.drafted[-1])] if end > done else []
        for i in range(first, len(self.ids)):
            part = self._decode(self.ids[: i + 1])
            while done < end and part.startswith(text[: done + 1]):  # it ends in token i
                marks.append((text[done], all(self.drafted[first : i + 1])))
                done += 1
                first = i if len(part) > done else i + 1  # where the next character begins
        self.fresh = len(self.ids) - first
        return marks
