"""Runs a model's Jinja template: a stranger's program that came with the weights.

Jinja's own sandbox keeps it from Python's insides; here it is also bounded in work and size, and its
operations are led to those that know marked text. What Jinja offers and chat templates have no use for, but
could grow huge with, is left out.

The only importer of jinja2. Knows nothing of messages.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_round, make_attrgetter, make_multi_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nemolocal.chat.operations import STEP, Budget, Operations, size
from nemolocal.chat.provenance import Marks
from nemolocal.errors import TemplateError

N_CHARS_SOURCE = 1_000_000
N_CHARS_SENTENCE = 300

# A template can fail with whatever Python raises; these are all that its operations can lead to.
_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class RefusedError(TemplateError):
    """The template itself refused the messages, by `raise_exception`."""


def compile_source(source: str) -> types.CodeType:
    """Raises TemplateError, one line, for a template that is no Jinja."""
    if len(source) > N_CHARS_SOURCE:
        raise TemplateError(f"The model's chat template is too long: {len(source)} characters.")
    environment = _Sandbox(Marks(), Budget(N_CHARS_SOURCE))
    try:
        return environment.compile(_Watched().visit(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        problem = f"line {error.lineno}: {error.message}"
    except _FAULTS as error:
        problem = f"{type(error).__name__}: {error}"
    raise TemplateError(f"The model's chat template cannot be read: {one_line(problem)}")


def run(
    code: types.CodeType,
    variables: Mapping[str, object],
    *,
    marks: Marks,
    n_budget: int,
    now: Callable[[], datetime],
    refuses_none: bool = False,
) -> str:
    """What the template writes, with its contents still marked. `n_budget` is in characters.

    `refuses_none` makes it a fault to write None. Raises RefusedError with the template's own sentence, and
    TemplateError for a fault of the template.
    """
    environment = _Sandbox(marks, Budget(n_budget), refuses_none=refuses_none)
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    try:
        template = environment.template_class.from_code(environment, code, environment.globals)
        return template.render(variables)
    except _FAULTS as error:
        problem = marks.unmark(f"{type(error).__name__}: {error}")
    raise TemplateError(
        f"The model's chat template failed on these messages: {one_line(problem)}", param="messages"
    )


def one_line(text: str) -> str:
    """`text` on one line of bounded length."""
    flat = " ".join(text[: 4 * N_CHARS_SENTENCE].split())
    return flat if len(flat) <= N_CHARS_SENTENCE else flat[: N_CHARS_SENTENCE - 1] + "…"


class _Generation(Extension):
    """`{% generation %}` marks what a training run learns from; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<namespace>"  # its own form would unfold all that is in it


class _Watched(NodeTransformer):
    """Leads what Jinja would leave to bare Python (comparing, joining, slicing, looping) through filters.
    Their names hold a colon, so that no template can spell them."""

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        arguments: list[nodes.Expr] = []
        for operand in node.ops:
            arguments += [nodes.Const(operand.op), operand.expr]
        return _filter(node.expr, "sandbox:compare", arguments, node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node.nodes[0], "sandbox:concat", node.nodes[1:], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "sandbox:pay", [], node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key = _filter(pair.key, "sandbox:unfold", [], node.lineno)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        step = _filter(nodes.Const(True), "sandbox:step", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        return node


def _filter(node: nodes.Expr, name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, arguments, [], None, None, lineno=lineno)


_WHOLE_FILTERS = frozenset(
    {"capitalize", "lower", "upper", "title", "e", "escape", "forceescape", "urlencode", "truncate"}
    | {"wordcount", "int", "float", "indent", "format", "tojson"}
)
_UNFOLDED_FILTERS = frozenset({"groupby", "max", "min", "unique"})
_NO_FILTERS = frozenset(
    {"batch", "center", "filesizeformat", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr"}
)
_PLAIN_TESTS = frozenset(
    {"in", "==", "eq", "equalto", "!=", "ne", "<", "lt", "lessthan", "<=", "le"}
    | {">", "gt", "greaterthan", ">=", "ge", "lower", "upper"}
)


class _Sandbox(ImmutableSandboxedEnvironment):
    """One render's environment, with the settings that transformers gives to chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, marks: Marks, budget: Budget, *, refuses_none: bool = False) -> None:
        do = Operations(marks, budget, refuses_none=refuses_none)
        self._marks = marks
        self._do = do
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=do.text,
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = self._refuse
        self.globals["namespace"] = _Namespace
        filters: dict[str, Callable[..., Any]] = dict(self.filters)
        for name in _NO_FILTERS:
            del filters[name]
        filters |= {"indent": self._indent, "format": do.format, "tojson": do.to_json}
        filters |= {name: do.whole(filters[name]) for name in _WHOLE_FILTERS}
        filters |= {name: do.unfolded(filters[name]) for name in _UNFOLDED_FILTERS}
        filters |= {
            "dictsort": self._dictsort,
            "join": self._join,
            "replace": do.replace,
            "round": self._round,
            "safe": do.text,  # without escaping, every text is safe
            "sort": self._sort,
            "string": do.text,
            "trim": do.trim,
        }
        self.filters = {name: do.paid(function) for name, function in filters.items()}
        self.filters |= {
            "sandbox:compare": do.compare,
            "sandbox:concat": self._concat,
            "sandbox:pay": self._pay,
            "sandbox:step": self._step,
            "sandbox:unfold": do.unfolded(lambda value: value),
        }
        tests: dict[str, Any] = {**self.tests}
        self.tests = tests | {name: do.whole(tests[name]) for name in _PLAIN_TESTS}

    # What Jinja calls --------------------------------------------------------------------------------

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._do.spend(STEP)
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps a text's format method
        if not isinstance(method, types.BuiltinMethodType):
            if isinstance(obj, type) or getattr(obj, "__name__", "") == "changed":
                obj = self._do.unfolded(obj)  # `dict` hashes what it is given, `loop.changed` compares it
            return super().call(context, obj, *args, **kwargs)
        owner, name = method.__self__, method.__name__
        for scope in ("_loop_vars", "_block_vars"):  # Jinja's own, for functions that take the context
            kwargs.pop(scope, None)
        if isinstance(owner, str) and name in ("format", "format_map"):
            self._do.pay_for_format(owner, [*args, *kwargs.values()])
            return super().call(context, obj, *args, **kwargs)
        if not self._do.is_for_templates(owner, name):
            raise SecurityError(f"the method {name} of {type(owner).__name__} is not for templates")
        if isinstance(owner, str):
            return self._do.call_text(owner, name, *args, **kwargs)
        # A key or item that is looked for; what follows it may be written, so it keeps its marks.
        self._do.spend(size(owner))
        return super().call(context, obj, *map(self._do.plain, args[:1]), *args[1:], **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self._do.plain(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._do.pay_for_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def concat(self, parts: Iterable[str]) -> str:
        return self._do.concat(parts)

    # What templates call -----------------------------------------------------------------------------

    def _refuse(self, message: object) -> None:
        sentence = one_line(self._marks.unmark(self._do.text(message)))
        raise RefusedError(f"The model's chat template refused the messages: {sentence}", param="messages")

    def _concat(self, *values: object) -> str:
        return self._do.join("", values)

    def _pay(self, value: object) -> object:
        self._do.spend(size(value))
        return value

    @jinja2.pass_context  # keeps Jinja from evaluating it once and for all when it compiles
    def _step(self, context: Context, value: object) -> object:
        self._do.spend(STEP)
        return value

    def _join(self, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> str:
        return self._do.join(d, value if attribute is None else map(make_attrgetter(self, attribute), value))

    def _sort(
        self,
        value: Iterable[object],
        reverse: bool = False,
        case_sensitive: bool = False,
        attribute: str | int | None = None,
    ) -> list[object]:
        keys = make_multi_attrgetter(self, attribute)
        return sorted(value, key=lambda v: self._do.sort_key(keys(v), case_sensitive), reverse=reverse)

    def _dictsort(
        self,
        value: Mapping[str, object],
        case_sensitive: bool = False,
        by: str = "key",
        reverse: bool = False,
    ) -> list[tuple[str, object]]:
        place = ("key", "value").index(by)
        return sorted(
            value.items(), key=lambda item: self._do.sort_key([item[place]], case_sensitive), reverse=reverse
        )

    def _round(self, value: float, precision: int = 0, method: str = "common") -> float:
        self._do.spend(10 ** min(abs(precision), 18))
        return do_round(value, precision, method)  # type: ignore[arg-type]

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        n_width = width if isinstance(width, int) else len(width)
        self._do.spend((text.count("\n") + 1) * max(n_width, 0))
        return do_indent(text, width, first, blank)
