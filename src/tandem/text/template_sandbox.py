"""Limits on the computation of a chat template. Templates come with untrusted models; Jinja's sandbox protects the
machine, but not its time and memory. No transformers, no mlx.

Jinja compiles a template to Python, which cannot be interrupted from outside. Every construct that can repeat or grow
is therefore charged to a budget. Charged are loop iterations and macro calls; operators, calls, filters and literal
lists, by the size of their result; and all output. Operations that multiply sizes are charged before they run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 10.0
MAX_STEPS = 2_000_000
"""Most loop iterations, calls, operators and filters together."""
MAX_SIZE = 128 * 1024 * 1024
"""Most characters of all intermediate results and output together, where a container's item counts `ITEM`. `PER_INPUT`
is allowed in addition per unit of the input's size."""
PER_INPUT = 16
ITEM = 16
MAX_DEPTH = 100
"""Deepest nesting of containers."""
MAX_BITS = 65536
"""Most bits of an integer."""

QUICK_SECONDS, QUICK_STEPS, QUICK_SIZE = 0.05, 20_000, 1024 * 1024
"""Limits for rendering on the event loop, which delays all other requests."""

_REMOVED_FILTERS = ("batch", "center", "filesizeformat", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
"""Filters that multiply their input, and that no known chat template uses."""
_TO_ITEMS = frozenset(("list", "sort", "unique", "map", "select", "reject", "selectattr", "rejectattr", "groupby",
                       "dictsort", "min", "max", "sum"))  # fmt: skip
"""Filters that split a text into its characters."""
_REFUSED_METHODS = frozenset(("center", "ljust", "rjust", "zfill", "expandtabs", "translate", "format_map", "encode"))
_WIDE = re.compile(r"\{[^{}]*(\d{4}|\{)|%(\([^)]{0,100}\))?[^a-zA-Z%]*(\d{4}|\*)")
"""Format with a width of four digits or more, or with a width from an argument."""
Result = TypeVar("Result")
_budget: ContextVar[Budget] = ContextVar("budget")


class TooExpensive(SecurityError):
    """Raised when a template needs more time or memory than a prompt can require."""


class Budget:
    """Remaining time, steps and size of one rendering. As a context manager, it is charged by the environment's
    operations."""

    def __init__(self, *inputs: object, quick: bool = False) -> None:
        """Set the limits. `inputs`: values that the template receives. `quick`: use the small limits."""
        self._seconds = QUICK_SECONDS if quick else MAX_SECONDS
        self._deadline = time.monotonic() + self._seconds
        self._steps = self._most_steps = QUICK_STEPS if quick else MAX_STEPS
        self._known: dict[int, tuple[object, int, int]] = {}
        """Container, its `deep` size and its depth, by id. The reference keeps the id from being reused."""
        self._limit = (QUICK_SIZE if quick else MAX_SIZE) + PER_INPUT * sum(map(self.deep, inputs))
        self._size = self._limit

    def __enter__(self) -> None:
        self._token = _budget.set(self)

    def __exit__(self, *exc: object) -> None:
        _budget.reset(self._token)

    def step(self, size: int = 0) -> None:
        """Charge one step and `size`. Raise TooExpensive."""
        self._steps -= 1
        self._size -= size
        if self._size < 0:
            raise TooExpensive("it makes larger texts or lists than a prompt can need")
        if self._steps < 0 or time.monotonic() > self._deadline:
            raise TooExpensive(f"it takes more than {self._most_steps} steps or {self._seconds:g} s")

    def result(self, value: Result) -> Result:
        """Charge a result and return it."""
        self.step(self.size(value))
        return value

    def size(self, value: object) -> int:
        """Return the size of a value without its items' contents. Raise TooExpensive for containers too large when
        expanded."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, list | tuple | dict):
            self.deep(value)
            return ITEM * len(value)
        return 0

    def deep(self, value: object) -> int:
        """Return the size of a value as text; shared parts count once per occurrence."""
        return self._deep(value, 0)[0]

    def _deep(self, value: object, level: int) -> tuple[int, int]:
        if isinstance(value, str):
            return len(value), 0
        if not isinstance(value, list | tuple | dict):
            return ITEM, 0
        known = self._known.get(id(value))
        if known is None:
            size, depth = ITEM, 0
            if level > MAX_DEPTH:
                raise TooExpensive(f"lists are nested more than {MAX_DEPTH} levels deep")
            for item in _parts(value):
                inner, levels = self._deep(item, level + 1)
                size, depth = size + inner + ITEM, max(depth, levels + 1)
            known = self._known[id(value)] = (value, size, depth)
        if known[2] > MAX_DEPTH or (level == 0 and known[1] > getattr(self, "_limit", known[1])):
            raise TooExpensive("it makes lists that unfold to more than a prompt can need")
        return known[1:]


def _parts(value: list[object] | tuple[object, ...] | dict[object, object]) -> Iterable[object]:
    return (part for pair in value.items() for part in pair) if isinstance(value, dict) else value


class _Charges(jinja2.ext.Extension):
    """Jinja extension that inserts charges into a parsed template, at loops, macros and literals."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Parse a `{% generation %}` block, which marks answers for training, as its contents."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def rewrite(self, template: nodes.Template) -> nodes.Template:
        """Insert the charges; return the template."""
        for node in list(template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            turn = nodes.ExprStmt(self.call_to("turn", [nodes.Const(text)], node.lineno), lineno=node.lineno)
            node.body.insert(0, turn)  # type: ignore[attr-defined]
        rewritten: nodes.Template = _Rewriter(self).visit(template)
        return rewritten.set_environment(self.environment)  # type: ignore[return-value]

    def call_to(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Expr:
        """Return an expression that calls a method of this class, whatever names the template defines."""
        return self.call_method(method, arguments, lineno=line)

    @staticmethod
    def turn(text: int) -> str:
        """Charge a loop iteration or macro call that outputs up to `text` constant characters."""
        _budget.get().step(text)
        return ""

    @staticmethod
    def made(value: Result) -> Result:
        """Charge a literal list, tuple or dict, a slice, or a comparison; return it."""
        return _budget.get().result(value)

    @staticmethod
    def joined(*values: object) -> str:
        """Evaluate the operator ~ (string concatenation), charged beforehand."""
        texts = [_text(value) for value in values]
        _budget.get().step(sum(map(len, texts)))
        return "".join(texts)


class _Rewriter(NodeTransformer):
    def __init__(self, charges: _Charges) -> None:
        self._call = charges.call_to

    def _made(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return self._call("made", [node], node.lineno) if getattr(node, "ctx", "load") == "load" else node

    visit_List = visit_Dict = visit_Tuple = visit_Compare = _made

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._made(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja sandbox whose rendering, within a `Budget`, raises TooExpensive at the limits."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        """Configure the block settings and extensions that transformers uses for chat templates."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Charges, jinja2.ext.loopcontrols], finalize=_output)
        del self.globals["lipsum"]
        self.globals["namespace"] = _Opaque
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.add_filter(name, function)

    def add_filter(self, name: str, function: Callable[..., object]) -> None:
        """Add or replace a filter, with charges."""
        self.filters[name] = _charged(name, function)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        charges = self.extensions[_Charges.identifier]
        assert isinstance(charges, _Charges)
        return charges.rewrite(super()._parse(source, name, filename))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Refuse string methods with unbounded results, and all methods of numbers."""
        if isinstance(obj, int | float | bytes) or (isinstance(obj, str) and attr in _REFUSED_METHODS):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Evaluate an operator, charged before it is computed."""
        budget = _budget.get()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):  # the most frequent case
            budget.step(len(left) + len(right))
            return left + right
        size = budget.size(left) + budget.size(right)
        if operator == "%" and isinstance(left, str):
            _before_text("format", left, (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise TooExpensive("it computes with larger numbers than a prompt can need")
        elif operator == "*" and size:
            size *= max(left if isinstance(left, int) else right if isinstance(right, int) else 1, 1)
        budget.step(size)
        return budget.result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandbox's replacement of `str.format`, with charges; None for other methods."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def run(*args: object, **kwargs: object) -> str:
            _before_text("format", value.__self__, (*args, *kwargs.values()))
            return formatted(*args, **kwargs)

        return run

    def call(self, context: Context, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """Call a function and charge its result; string methods are charged before the call."""
        if getattr(function, "__qualname__", "").startswith("_Charges."):
            return function(*args)
        text = getattr(function, "__self__", None)
        if isinstance(text, str):
            _before_text(function.__name__, text, (*args, *kwargs.values()))
        return _budget.get().result(super().call(context, function, *args, **kwargs))


class _Opaque(Namespace):
    """Jinja's namespace object, whose text does not include its contents."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _text(value: object) -> str:
    """Return `str(value)`, charged beforehand."""
    if isinstance(value, str):
        return value
    _budget.get().step(_budget.get().deep(value))
    return str(value)


@jinja2.pass_context  # so that Jinja does not call this at compile time
def _output(_: object, value: object) -> object:
    """Charge a value that is output, as Jinja's `finalize`."""
    if not isinstance(value, jinja2.Undefined):
        value = _text(value)
        _budget.get().step(len(value))
    return value


def _before_text(name: str, text: str, args: tuple[object, ...]) -> None:
    """Charge the result of a string method or filter before the call."""
    budget = _budget.get()
    size = len(text)
    if name == "replace" and len(args) > 1:
        size += (text.count(str(args[0])) + 1) * budget.deep(args[1])
    elif name == "join" and args:
        size = budget.deep(args[0]) + len(text) * (len(args[0]) if hasattr(args[0], "__len__") else 1)
    elif name == "format":
        if _WIDE.search(text):
            raise TooExpensive("it formats with a width that is computed or has more than 3 digits")
        size += (text.count("%") + text.count("{")) * sum(map(budget.deep, args))
    elif name in ("split", "rsplit", "splitlines"):
        size += ITEM * (text.count(args[0]) if args and isinstance(args[0], str) and args[0] else len(text) // 2)
    budget.step(size)


def _charged(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Wrap a filter so that its input and its result are charged."""
    position = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja passes a context or environment first

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        if position < len(args):
            value = args[position]
            _before_filter(name, value, (*args[position + 1 :], *kwargs.values()))
            if isinstance(value, Iterator):
                args = (*args[:position], _counted(value), *args[position + 1 :])
        result = function(*args, **kwargs)
        return _counted(result) if isinstance(result, Iterator) else _budget.get().result(result)

    return run


def _before_filter(name: str, value: object, more: tuple[object, ...]) -> None:
    budget = _budget.get()
    size = budget.deep(value)
    if name in ("replace", "format"):
        return _before_text(name, _text(value), more)
    if name == "join":
        size += (len(value) if hasattr(value, "__len__") else 1) * max(map(budget.deep, more), default=0)
    elif name == "indent":
        widths = [len(x) if isinstance(x, str) else int(x) for x in more if isinstance(x, str | int)]
        size += (_text(value).count("\n") + 1) * max(widths, default=4)
    elif name == "tojson":
        size = 8 * size
        if any(isinstance(x, int) and x > ITEM for x in more):
            raise TooExpensive(f"it indents JSON by more than {ITEM}")
    elif name == "sum" and any(isinstance(x, str | list | tuple) for x in more[1:]):
        raise TooExpensive("it adds up lists with the filter sum")
    elif name in _TO_ITEMS and hasattr(value, "__len__"):
        size += ITEM * len(value)
    budget.step(size)


def _counted(values: Iterator[Result]) -> Iterator[Result]:
    """Yield the items, charging each for its contents."""
    budget = _budget.get()
    for value in values:
        budget.step(ITEM + budget.deep(value))
        yield value
