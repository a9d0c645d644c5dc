"""Configurations: dataclasses filled from YAML, checkpoints and dotted command-line options, typed and checked."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

__all__ = ["build_parser", "parse_arguments", "parse_config", "read_yaml", "recipe_path", "recipes"]

Config = TypeVar("Config")

_RECIPES = Path(__file__).parent / "recipes"


def recipes() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in _RECIPES.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """The YAML file that a recipe's name, or a path, stands for.

    Raises:
        FileNotFoundError: neither a file nor a recipe.
    """
    if Path(name).is_file():
        return Path(name)
    if name in recipes():
        return _RECIPES / f"{name}.yaml"
    raise FileNotFoundError(f"no configuration file {name!r}, and no recipe of that name{_nearest(name, recipes())}")


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML takes the last of equal keys without a word, and the others are lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """See PyYAML."""
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} twice", key.start_mark)
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: the file is no YAML, holds a key twice, or holds something else than a mapping.
    """
    try:
        content = _UniqueKeys(Path(path).read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, not a {type(content).__name__}")
    return content


# Arguments of a verb beside the configuration's own: (flags or name, keywords of add_argument).
Arguments = Sequence[tuple[tuple[str, ...], dict[str, Any]]]


def build_parser(config: type[Any], arguments: Arguments = (), **kwargs: Any) -> ArgumentParser:
    """A parser with one dotted option for every field of a dataclass, documented by the field docstrings.

    Args:
        config: the dataclass.
        arguments: further arguments.
        **kwargs: for the parser (``prog``, ``usage``, ``description``, ...).
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config=None, **kwargs)
    for flags, keywords in arguments:
        parser.add_argument(*flags, **keywords)
    parser.add_class_arguments(config)
    return parser


def parse_arguments(config: type[Any], argv: Sequence[str], arguments: Arguments) -> Namespace:
    """The values of a verb's own arguments, before the configuration they may name is known.

    Raises:
        ValueError: an option that neither the verb nor the configuration has, or a value of the wrong type.
    """
    try:
        return build_parser(config, arguments).parse_args(list(argv))
    except ArgumentError as error:
        raise ValueError(_explain(error.message, config)) from error


def parse_config(
    config: type[Config],
    content: Mapping[str, Any] | None = None,
    argv: Sequence[str] = (),
    where: str = "",
    arguments: Arguments = (),
) -> Config:
    """A configuration from a mapping, then dotted options (``--optim.lr 1e-3``) on top.

    Args:
        config: a dataclass, possibly of dataclasses.
        content: nested mapping, from YAML or from a checkpoint.
        argv: command-line options.
        where: where ``content`` comes from, for messages.
        arguments: what ``argv`` holds beside the configuration.

    Raises:
        ValueError: an unknown key (with the nearest valid one), a value of the wrong type or out of range.
    """
    place = f"{where}: " if where else ""
    content = {} if content is None else content
    _check_keys(config, content, place)
    try:
        namespace = build_parser(config).parse_object(dict(content))
        if argv:
            namespace = build_parser(config, arguments).parse_args(list(argv), namespace=namespace)
        parsed = build_parser(config).instantiate(namespace)
        return config(**{field.name: parsed[field.name] for field in dataclasses.fields(config)})  # type: ignore[arg-type]
    except ArgumentError as error:
        raise ValueError(place + _explain(error.message, config)) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{place}{' '.join(str(error).split())}") from error


def _check_keys(config: Any, content: Any, place: str, prefix: str = "") -> None:
    """Reject unknown keys before anything is converted, naming the nearest valid one."""
    if not isinstance(content, Mapping):
        raise ValueError(f"{place}{prefix or 'the configuration'} must hold keys and values, not {content!r}")
    fields = _fields(config)
    for key, value in content.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if key not in fields:
            raise ValueError(f"{place}unknown key {name!r}{_nearest(name, _dotted(config, prefix))}")
        if dataclasses.is_dataclass(fields[key]):
            _check_keys(fields[key], value, place, name)


def _fields(config: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(config)
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def _dotted(config: Any, prefix: str = "") -> list[str]:
    """Every valid dotted key."""
    names = []
    for name, kind in _fields(config).items():
        dotted = f"{prefix}.{name}" if prefix else name
        names += [dotted, *(_dotted(kind, dotted) if dataclasses.is_dataclass(kind) else [])]
    return names


def _explain(message: str, config: Any) -> str:
    """A parser's message on one line, with the nearest key where one was not known."""
    message = " ".join(message.split())
    if match := re.search(r"unrecognized arguments: (-*[\w.]+)", message):
        return f"unknown option {match[1]}{_nearest(match[1].lstrip('-'), _dotted(config), '--')}"
    return message


def _nearest(name: str, valid: Sequence[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{near[0]}?" if near else f"; valid: {', '.join(valid)}"
