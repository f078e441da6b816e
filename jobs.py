"""Many prompts: a file with lines of {"prompt": TEXT}, and for each a line of JSON, in their order.

A file of answers is resumed: what it has, by the prompt's place, its text and the settings, is not
computed again. Where several processes take every n-th prompt, the first one writes for all.
"""

import fcntl
import hashlib
import json
import os
import queue
import sys
import threading

import command
import ranks
from text import read_text

BEGINNING = b'{"index": '  # of an answer in the file


def read_prompts(path):
    """[(where it stands, prompt)]"""
    prompts = []
    for i, line in enumerate(read_text(path).split("\n"), 1):
        where = f"line {i} of {path}"
        try:
            prompts += [(where, json.loads(line)["prompt"] + "")] if line.strip() else []
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ValueError(f'{where} is not {{"prompt": TEXT}}') from None
    return prompts


class Answers:
    """The file of answers: `missing` are the places of the prompts that have none in it yet.

    A line is complete when it ends; one that a killed process left half-written is taken away.
    """

    def __init__(self, path, prompts, settings):
        kind = json.dumps(settings, sort_keys=True, default=str)
        hashes = [hashlib.sha256(f"{kind}\n{prompt!r}".encode()) for _, prompt in prompts]
        self.keys = [
            {"index": i, "hash": digest.hexdigest()[:16]} for i, digest in enumerate(hashes)
        ]
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"--output {path}: it is no regular file")
        self.path, self.file = path, open(path, "ab", buffering=0)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--output {path}: another process is writing to it") from None
        found, end = set(), 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.endswith(b"\n"):
                        end += len(line)
                        answer = json.loads(line)
                        found.add((answer["index"], answer["hash"]))
                    elif line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                        raise ValueError
                except (ValueError, LookupError, TypeError, RecursionError):
                    what = f"line {number} is no answer that this program wrote"
                    raise ValueError(f"--output {path}: {what}") from None
        self.file.truncate(end)
        self.missing = [i for i, key in enumerate(self.keys) if tuple(key.values()) not in found]

    def write(self, i, result):
        line = json.dumps(self.keys[i] | result).encode() + b"\n"
        try:
            while line:
                line = line[self.file.write(line) :]
        except OSError as error:
            raise ValueError(f"cannot write to --output {self.path}: {error.strerror}") from None


def answer_all(args, prompts, answer, apart, group):
    """Answers all prompts that have no answer yet. group: the ranks; apart: those that take prompts
    each, None where all ranks answer each prompt together."""
    answers = None
    speaks = group is None or group.rank() == 0
    has_bar = speaks and (apart or sys.stderr.isatty())  # mlx.launch passes it on

    def open_answers():
        nonlocal answers
        if args.output is None:
            return [*range(len(prompts))]
        answers = Answers(args.output, prompts, settings(args))
        return answers.missing

    places = ranks.share(open_answers, group)
    done = len(prompts) - len(places)

    def write(i, result):
        nonlocal done
        if not speaks:
            return
        if answers:
            answers.write(i, result)
        else:
            print(json.dumps(result), flush=True)
        done += 1
        if has_bar:
            bar = f"\r[{'#' * (30 * done // len(prompts)):<30}] {done}/{len(prompts)}"
            command.say(bar, end="\n" * (done == len(prompts)))

    try:
        if apart:
            take_turns(places, answer, write, apart)
        else:
            for i in places:
                write(i, answer(i))
    finally:
        if has_bar and 0 < done < len(prompts):
            command.say("")
        if answers:
            answers.file.close()


def settings(args):
    """What an answer depends on."""
    aside = "prompt", "prompt_file", "prompts_file", "output", "data_parallel", "color", "json"
    return {name: value for name, value in vars(args).items() if name not in aside}


def take_turns(places, answer, write, group):
    """Calls answer(i) for each place i on one rank of the group, then write(i, answer) on all, in
    order. A thread carries the answers, so that no rank waits for another."""
    rank, size, errors = group.rank(), group.size(), []
    rounds = [places[i : i + size] for i in range(0, len(places), size)]
    answered: queue.SimpleQueue = queue.SimpleQueue()

    def carry():
        try:
            for members in rounds:
                results = ranks.exchange(answered.get(), group)
                for i, (result, error) in zip(members, results, strict=False):
                    if error is not None:
                        raise ValueError(error)
                    write(i, result)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    for members in rounds:
        if errors:
            break
        try:
            answered.put((answer(members[rank]) if rank < len(members) else None, None))
        except ranks.FAILURES as error:
            answered.put((None, f"rank {rank}: {str(error) or type(error).__name__}"))
            break
    thread.join()
    if errors:
        raise errors[0]
