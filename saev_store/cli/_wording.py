"""What the library says in terms of Python, in terms of the command line: options for arguments, commands for methods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol


class Parameter(Protocol):
    """An option or argument of a command."""

    name: str | None
    opts: Sequence[str]
    secondary_opts: Sequence[str]
    metavar: str | None


class SubCommand(Protocol):
    """A command of the group."""

    params: Sequence[Parameter]


#: A keyword argument in a sentence of the library.
_KEYWORD = re.compile(
    r"""\b([a-z_]+)=("[^"]*"|'[^']*'|\[[^]]*\]|\([^)]*\)|\{(?:[^{}]|\{[^{}]*\})*\}|\w+|…)""", re.ASCII
)
#: What Python writes around values and between those of a list.
_NOT_IN_A_SHELL = r"""["'()\[\] ]"""
#: Options whose values are words, where the library has True, False and None.
_WORDS = {
    ("record", "bos", "None"): "none", ("repair", "bos", "None"): "none",
}  # fmt: skip
#: Arguments whose options, or arguments of commands, have other names.
_OTHER_NAMES = {"client": "scheduler", "output_path": "dst", "path": "out", "target": "out", "base": "template"}
_CLEAN = "`saev-store clean`"
#: Methods and functions of the library, and what does the same on the command line.
_COMMANDS = (
    (r'write it anew with store\.repair\(\)\.restore_array\("\w+", \.\.\.\)', "record it again with `saev-store repair`"),
    (r"`?store\.validate\(deep=True\)`?", "`saev-store validate --deep`"),
    (r"`?store\.validate\(\)`?", "`saev-store validate`"),
    (r"`?store\.repair\(\)`?", "`saev-store repair`"),
    (r"`?ShardStore\.list\(root\)`?", "`saev-store ls`"),
    (r"`discard_unfinished`(?: or `saev-store clean --older-than 0` of its folder)?", _CLEAN),
    (r"\bstorage_options\b(?!=)", "--storage-options"),
)  # fmt: skip
#: A call, a keyword or a name of Python.
_OF_PYTHON = re.compile(r"\b[A-Za-z_][\w.]*\([^)]*\)|\b[a-z_]+=(?!=)|`[a-z]+_[a-z_]+`")
_OPTION = re.compile(r"(?:^|[\s`])--?[a-z]")
_BETWEEN_SENTENCES = re.compile(r"(?<=[.!?]) +(?=[A-Z`])")


def as_commands(text: str) -> str:
    """A sentence with commands for methods of the library.

    >>> as_commands("store.validate() lists everything that is lost, store.repair() records it again.")
    '`saev-store validate` lists everything that is lost, `saev-store repair` records it again.'
    """
    for method, command in _COMMANDS:
        text = re.sub(method, command, text)
    return text


class Wording:
    """The names of a command's options, for errors that name arguments of the library.

    An argument and its option may differ in number: `layer` of the library is `--layers` of `copy`.

    Args:
        commands: The commands by name.
        argv: The arguments, with the name of one of the commands.

    >>> from saev_store.cli._run import app
    >>> wording = Wording(app().commands, ["copy", "a", "b"])
    >>> wording.names("max_mb_per_s"), wording.names("acts000001.bin")
    ('--max-mb-per-s', 'acts000001.bin')
    >>> wording.text('Use dtype="float32", resume=False or copy=None.')
    'Use --dtype float32, --no-resume or copy=None.'
    >>> wording.remedy("Continue it with resume=True. From Python: `discard_unfinished`.")
    'Continue it with --resume.'
    """

    def __init__(self, commands: Mapping[str, SubCommand], argv: Sequence[str]) -> None:
        self._command = next((word for word in argv if word in commands), "")
        self._parameters: dict[str | None, Parameter] = {}
        self._address: Parameter | None = None  # SRC, ROOT or PATH, which the library calls url
        for parameter in commands[self._command].params if self._command else ():
            for option in parameter.opts:
                self._parameters.setdefault(option.lstrip("-").replace("-", "_"), parameter)
            self._parameters[parameter.name] = parameter
            if not parameter.opts[0].startswith("-"):
                self._address = self._address or parameter

    def _parameter(self, argument: str) -> Parameter | None:
        for name in (argument, f"{argument}s", argument.removesuffix("s"), _OTHER_NAMES.get(argument)):
            if name in self._parameters:
                return self._parameters[name]
        return self._address if argument in {"url", "root"} else None

    def _name(self, argument: str) -> str:
        parameter = self._parameter(argument)
        if parameter is None:
            return argument
        is_option = parameter.opts[0].startswith("-")
        return _long_name(parameter) if is_option else parameter.metavar or parameter.opts[0].upper()

    def names(self, where: str, message: str = "") -> str:
        """Arguments, separated by commas, as options; other text as it is.

        An error in the metadata of a new store begins with the name of a key, which has an option if it comes from one.
        """
        key = message.partition(" ")[0]
        if where == "metadata" and self._parameter(key) is not None:
            return self._name(key)
        return ", ".join(map(self._name, where.split(", ")))

    def text(self, text: str) -> str:
        """Sentences with options for keyword arguments, and commands for methods."""
        return as_commands(_KEYWORD.sub(self._as_option, text))

    def remedy(self, text: str) -> str | None:
        """Sentences as of `text`, without those that are for callers from Python; None if none is left."""
        sentences = [
            as_commands(each) if _OPTION.search(each) else self.text(each) for each in _BETWEEN_SENTENCES.split(text)
        ]
        told = " ".join(filter(_is_for_commands, sentences)) or None
        # Without an age it keeps what is younger than a day. Not earlier: a sentence with an option is taken for one of commands.
        return told and told.replace(_CLEAN, "`saev-store clean --older-than 0` of its folder")

    def _as_option(self, found: re.Match[str]) -> str:
        argument, value = found.groups()
        parameter = self._parameter(argument)
        if parameter is None or not parameter.opts[0].startswith("-"):
            return found[0]
        option, word = _long_name(parameter), _WORDS.get((self._command, argument, value))
        if word is not None:
            return f"{option} {word}"
        if value == "True":
            return option
        if value == "False" and parameter.secondary_opts:
            return parameter.secondary_opts[-1]
        if value.startswith("{"):
            return f"{option} '{value}'"
        return f"{option} {re.sub(_NOT_IN_A_SHELL, '', value)}"


def _long_name(parameter: Parameter) -> str:
    """The first name of an option that is no single letter, if it has one."""
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])


def _is_for_commands(sentence: str) -> bool:
    """Whether a sentence tells a user of the command line something."""
    if sentence.startswith("From Python"):
        return False
    return _OPTION.search(sentence) is not None or _OF_PYTHON.search(sentence) is None
