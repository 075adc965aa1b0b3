"""A recipe: base, head, data and training of one run as YAML, with dotted overrides, checked before anything loads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specheads.data.config import DataConfig
from specheads.heads import HEADS, HeadConfig, head_config
from specheads.models.base.lora import JointConfig
from specheads.options import read_yaml, refuse_unknown, shown
from specheads.training.distributed.launch import LaunchConfig
from specheads.training.parity import ParityConfig
from specheads.training.recipe import options as training_options
from specheads.training.recipe.keys import key_of, names_in


class RecipeError(ValueError):
    """A recipe, or an override, that cannot be run; the message says why in one line."""


DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Recipe:
    """What one run of train/heads.py does.

    base: path or hub id; base_dtype and head_dtype: "auto", "float32", "bfloat16" or "float16" ("auto" is what the
    base was saved in); load_in_4bit, load_in_8bit: quantise the base with bitsandbytes (with lora: QLoRA);
    attn_implementation: the base's. features: a folder of saved features, used instead of base, data and their
    options, which are then ignored. feature_cache: a folder in which the first epoch stores the base's features for
    later ones. head: {kind: …, options}. init_from: a head checkpoint to continue from, instead of a new head.
    training: SpecTrainingArguments by name; resume_from_checkpoint: auto is the last one in output_dir, if any.
    early_stopping: how many evaluations without a better training.metric_for_best_model end the run. launch: what the
    launcher is expected to have started. parity: the comparison with real decoding at the end of the run;
    parity.prompts=0 skips it. lora: adapters on the base that train with the head, see JointConfig.
    """

    training: dict[str, Any]
    base: str = ""
    data: DataConfig | None = None
    features: str | None = None
    feature_cache: str | None = None
    head: HeadConfig | None = None
    base_dtype: str = "auto"
    head_dtype: str = "float32"
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    attn_implementation: str | None = None
    init_from: str | None = None
    early_stopping: int | None = None
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    parity: ParityConfig = field(default_factory=ParityConfig)
    lora: JointConfig | None = None

    def __post_init__(self) -> None:
        if self.features is not None and (not isinstance(self.features, str) or not self.features):
            raise RecipeError(f"features={self.features!r}: expected a folder that `specheads features` has filled")
        if self.features is not None and self.lora is not None:
            raise RecipeError(
                "lora trains the base too, which saved features stand in for: give lora=null or no features"
            )
        if self.feature_cache is not None and (not isinstance(self.feature_cache, str) or not self.feature_cache):
            raise RecipeError(f"feature_cache={self.feature_cache!r}: expected a folder, or null")
        for name, value in (("features", self.features), ("lora", self.lora)):
            if self.feature_cache is not None and value is not None:
                raise RecipeError(
                    f"feature_cache keeps what a frozen base sees, and with {name} none is in memory: leave one out"
                )
        if not isinstance(self.base, str) or not (self.base or self.features):
            raise RecipeError(f"base={self.base!r}: expected a path or a hub id")
        for name in ("base_dtype", "head_dtype"):
            if getattr(self, name) not in DTYPES:
                raise RecipeError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(DTYPES)}")
        for name in ("init_from", "attn_implementation"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RecipeError(f"{name}={value!r:.60}: expected text, or null")
        for name in ("load_in_4bit", "load_in_8bit"):
            if not isinstance(getattr(self, name), bool):
                raise RecipeError(f"{name}={getattr(self, name)!r:.60}: expected true or false")
        if self.early_stopping is not None and (type(self.early_stopping) is not int or self.early_stopping < 1):
            raise RecipeError(f"early_stopping={self.early_stopping!r:.60}: expected a whole number of at least 1")
        if self.load_in_4bit and self.load_in_8bit:
            raise RecipeError("load_in_4bit and load_in_8bit are both true: give one of them")
        if (self.head is None) == (self.init_from is None):
            raise RecipeError(
                "give either head (a new one: head.kind=eagle3) or init_from (a head checkpoint to continue from), not "
                + ("neither" if self.head is None else "both; with init_from write head=null")
            )
        if self.lora is not None and self.init_from is not None:
            raise RecipeError(
                "lora puts new adapters on a base; with init_from those of that checkpoint are trained on"
            )
        if self.early_stopping is not None and not self._picks_the_best():
            raise RecipeError(
                f"early_stopping={self.early_stopping} needs training.eval_strategy other than no, "
                "training.metric_for_best_model (accepted_length, say) and training.load_best_model_at_end=true"
            )
        if not self.training.get("output_dir"):
            raise RecipeError("training.output_dir is missing: give the folder the head is saved to")

    def _picks_the_best(self) -> bool:
        wanted = ("metric_for_best_model", "load_best_model_at_end")
        return str(self.training.get("eval_strategy", "no")) != "no" and all(self.training.get(n) for n in wanted)

    def to_yaml(self) -> str:
        """The recipe as YAML, without defaults, and without hub tokens, since cards show it; rows given in memory
        cannot be part of it."""

        def changed(section: Any) -> dict[str, Any]:
            named = () if section is None else dataclasses.fields(section)
            given = {f.name: (getattr(section, f.name), f.default) for f in named}
            return {name: value for name, (value, usual) in given.items() if value != usual and _plain(value)}

        options = {**changed(self), "head": None if self.head is None else self.head.to_dict()}
        options |= {name: changed(getattr(self, name)) for name in ("data", "launch", "parity")}
        options["lora"] = None if self.lora is None else self.lora.to_dict()
        options["training"] = {
            name: value for name, value in self.training.items() if _plain(value) and not name.endswith("_token")
        }
        return yaml.safe_dump({name: value for name, value in options.items() if value}, sort_keys=False)

    @property
    def bits(self) -> int | None:
        """Bits per weight of the base's layers; None if it is not quantised."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else None

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Recipe:
        """RecipeError for an unknown, missing or malformed option, with its dotted name."""
        if not isinstance(options, Mapping):
            raise RecipeError(f"a recipe is a mapping with base, head, data and training, not {options!r:.60}")
        options = dict(options)
        try:
            _refuse_misplaced("", options, _top())
            refuse_unknown(options, _top())
            for name in ("training",) if options.get("features") else ("base", "data", "training"):
                if options.get(name) is None:
                    raise RecipeError(f"{name} is missing: set it in the recipe or as {name}=…")
            sections = {
                name: _section(name, options.get(name))
                for name in ("data", "training", "launch", "parity", "head", "lora")
            }
            return cls(
                **{key: value for key, value in options.items() if key not in (*sections, "base")},
                base=options.get("base") or "",
                data=DataConfig.from_dict(sections["data"]) if options.get("data") is not None else None,
                training=training_options.check(sections["training"]),
                launch=LaunchConfig.from_dict(sections["launch"]),
                parity=ParityConfig.from_dict(sections["parity"]),
                lora=JointConfig.of(sections["lora"]) if options.get("lora") is not None else None,
                head=_head(sections["head"]) if options.get("head") is not None else None,
            )
        except RecipeError:
            raise
        except (ValueError, TypeError) as error:
            raise RecipeError(str(error)) from error


def key_hint(flag: str, value: str, *, similar: bool) -> str:
    """`; did you mean KEY=VALUE?` for a flag that has the name of a recipe's option, or a similar one; "" otherwise."""
    key = key_of(flag, _top(), similar=similar)
    return "" if key is None else f"; did you mean {key}={value}? A recipe's options are given as KEY=VALUE"


def read_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a YAML file with `key=value` overrides: dotted keys, values typed as in YAML."""
    file = Path(path)
    if not file.is_file():
        raise RecipeError(f"no recipe {str(path)!r} (looked from {Path.cwd()})")
    options = parse_file(file)
    if not isinstance(options, Mapping):
        raise RecipeError(f"{path} holds {options!r:.60}: expected a mapping with base, head, data and training")
    return Recipe.from_dict(with_overrides(options, overrides))


def with_overrides(options: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`options` with each `a.b=value` set; a section that is absent or null is created."""
    result = _copied(options)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise RecipeError(f"override {override!r}: expected key=value, for instance training.max_steps=100")
        *path, last = key.split(".")
        section = result
        for name in path:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise RecipeError(f"override {override!r}: {name!r} is {section!r}, which has no options")
        section[last] = parse_yaml(text, f"override {override!r}")
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return value


def _plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_plain, value.values()))
    return isinstance(value, str | int | float | None) or (isinstance(value, list | tuple) and all(map(_plain, value)))


def parse_file(file: Path) -> Any:
    """The value of a YAML file. RecipeError, beginning with its name, if it is not YAML."""
    try:
        text = file.read_text("utf8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file} is not UTF-8 text: {error}; save the file as UTF-8") from error
    return parse_yaml(text, str(file))


def parse_yaml(text: str, name: str) -> Any:
    """The value of a YAML text. RecipeError, beginning with `name`, if it is not YAML."""
    try:
        return read_yaml(text, name)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _top() -> list[str]:
    """The keys without a section, and the sections."""
    return [field.name for field in dataclasses.fields(Recipe)]


def _refuse_misplaced(section: str, options: Iterable[str], known: Collection[str]) -> None:
    """RecipeError for an option that is not in `known`, with the key that it has in another section. section: where it
    was given, such as "head."; "" for none, and then a similar key is named, too."""
    for name in options:
        if name not in known and (key := key_of(str(name), _top(), similar=not section)):
            raise RecipeError(f"unknown option {shown(section + str(name))}; did you mean {key!r}?")


def _section(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        key = key_of(name, _top())
        hint = f"; did you mean {key}={value}?" if isinstance(value, str) and key != name else ""
        raise RecipeError(f"{name}={value!r:.60}: expected a mapping of options{hint}")
    _refuse_misplaced(f"{name}.", value, names_in(name))
    return dict(value)


def _head(options: dict[str, Any]) -> HeadConfig:
    if options.get("kind") is None:
        raise RecipeError(f"head.kind is missing: give one of {', '.join(HEADS)}")
    kind = options.pop("kind")
    return head_config(kind, options)
