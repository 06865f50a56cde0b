"""A template is a stranger's program: it ends, stays small, reaches nothing, and fails on one line."""

from __future__ import annotations

import pytest

from nemolocal.chat.provenance import Marks
from nemolocal.chat.sandbox import compile_source, run
from nemolocal.errors import TemplateError
from tests.chat.templates import NOW

LONG = "{% set x = 'a' * 1000 %}"
# A list of lists that is small in memory, and unfolds to 2 to the power of 60 items.
FOLDED = "{% set x = [1] %}{% set y = [2] %}" + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60
FOLDED_TUPLE = "{% set x = (1,) %}" + "{% set x = (x, x) %}" * 60


def write(source: str, **variables: object) -> str:
    values = {"messages": [{"role": "user", "content": "Hi"}], **variables}
    return run(compile_source(source), values, marks=Marks(), n_budget=1_000_000, now=lambda: NOW)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
        "{% for i in range(99999) %}{{ i in range(99999) | list }}{% endfor %}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        LONG + "{% for i in range(9999) %}{% set y = x[1:] %}{% endfor %}",
        LONG + "{% for i in range(9999) %}{% set y = x == x %}{% endfor %}",
        LONG + "{% for i in range(9999) %}{% set y = x | upper %}{% endfor %}",
        LONG + "{% for i in range(9999) %}{% set y = x.find('b') %}{% endfor %}",
        LONG + "{% for i in range(9999) %}{% set y = x is upper %}{% endfor %}",
    ],
)
def test_a_template_that_would_run_for_ever_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        write(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * [1] }}",
        "{{ 7 ** (10**10) }}",
        "{{ 'a' if 'b' * 10**10 else 'c' }}",
        "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        LONG + "{% set x = x ~ x %}" * 50,
        LONG + "{% set x = x + x %}" * 50,
        LONG + "{% set x %}{{ x }}{{ x }}{% endset %}" * 50,
        LONG + "{% for i in range(9999) %}{{ x }}{% endfor %}",
        LONG + "{% set x = x.replace('a', x) %}" * 5,
        LONG + "{% set x = x | replace('a', x) %}" * 5,
        LONG + "{% set x = x.join(range(9999)) %}",
        LONG + "{{ range(9999) | join(x) }}",
        "{% set x = [1] %}" + "{% set x = x + x %}" * 50,
        "{{ '%1000000000d' % 5 }}",
        "{{ '%.1000000000f' % 5 }}",
        "{{ '%*d' % (1000000000, 5) }}",
        "{{ '%1000000000d' | format(5) }}",
        "{{ '{:1000000000}'.format(5) }}",
        "{{ '{:{}}'.format(5, 1000000000) }}",
        "{{ '{:{w}}'.format(5, w=1000000000) }}",
        "{{ 'a' | indent(10**10, true) }}",
        "{{ [[1]] | tojson(indent=10**10) }}",
        "{{ 1.5 | round(10**10, 'ceil') }}",
        *(FOLDED + f"{{{{ {expression} }}}}" for expression in (
            "x", "x ~ ''", "x | string", "x | join", "x | tojson", "x == y", "x in [y]", "[x, y] | max",
            "[x, y] | sort", "x | int", "'%s' % (x,)", "'{}'.format(x)", "namespace(a=x).a",
            "{'a': x}.items()", "[x].index(y)", "raise_exception(x)",
        )),
        FOLDED + "{% for z in [x, y] %}{{ loop.changed(z) }}{% endfor %}",
        *(FOLDED_TUPLE + f"{{{{ {expression} }}}}" for expression in (
            "{x: 1}", "dict([[x, 1]])", "namespace([[x, 1]])", "[x] | unique | list", "{}[x]", "{}.get(x)",
        )),
    ],
)  # fmt: skip
def test_a_template_that_would_grow_without_end_is_stopped(source: str) -> None:
    with pytest.raises(TemplateError):
        write(source)


def test_a_namespace_is_not_unfolded_when_it_is_written() -> None:
    assert write(FOLDED + "{% set ns = namespace() %}{% set ns.x = x %}{{ ns }}") == "<namespace>"


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "''['__class__']['__mro__']",
        "('' | attr('__class__')).__mro__",
        "messages.__class__.__base__",
        "raise_exception.__func__.__globals__",
        "strftime_now.__globals__['now']",
        "cycler.__init__.__globals__",
        "namespace.__init__.__globals__",
        "self._TemplateReference__context.x",
        "'{0.__class__.__mro__}'.format(1)",
        "'%s' | format(messages.__class__.x)",
        "messages.append(1)",
        "messages[0].update(role='x')",
        "''.join.__self__.__class__",
        "lipsum(9)",
        "(5).to_bytes(9, 'big')",
        "'a'.encode()",
        "'a'.center(9)",
        "'a'.zfill(9)",
        "'a'.format_map.__self__.__class__",
    ],
)
def test_pythons_insides_are_out_of_reach(expression: str) -> None:
    with pytest.raises(TemplateError):
        write(f"{{{{ {expression}.x }}}}")


@pytest.mark.parametrize("tag", ["include 'x'", "import 'x' as y", "from 'x' import y", "extends 'x'"])
def test_no_other_file_is_read(tag: str) -> None:
    with pytest.raises(TemplateError):
        write(f"{{% {tag} %}}")


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "a\nb {{ 'x",
        "{% for x in y %}",
        "{% unknown %}",
        "{{ x | unknown }}",
        "{{ x is unknown }}",
        "{% break %}",
        "{{ " + "(" * 5000 + " }}",
        "{{ " + "-" * 5000 + "1 }}",
        "{{ x" + ".y" * 5000 + " }}",
        "{% if x %}" * 300 + "{% endif %}" * 300,
        "{{ " + "9" * 5000 + " }}",
        "x" * 1_000_001,
    ],
)
def test_what_is_no_template_is_an_error_on_one_short_line(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template") as caught:
        compile_source(source)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_the_line_of_a_mistake_is_named() -> None:
    with pytest.raises(TemplateError, match="line 3: Encountered unknown tag 'foo'"):
        compile_source("a\nb\n{% foo %}")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('Only one\n\nturn.') }}", "Only one turn."),
        ("{{ raise_exception('x' * 1000) }}", "…"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing.content }}", "'nothing' is undefined"),
        ("{{ messages[7].role }}", "no element 7"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
    ],
)
def test_a_fault_while_rendering_is_an_error_on_one_short_line(source: str, sentence: str) -> None:
    with pytest.raises(TemplateError) as caught:
        write(source)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 400
    assert caught.value.param == "messages"
