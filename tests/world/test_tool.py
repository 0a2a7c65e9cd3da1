import functools
import importlib
import inspect
import json
import math
import pickle
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from unspool.types import InvalidTypeError, InvalidValueError
from unspool.world import Tool, ToolManager, calculator, tool

sys.path.insert(0, str(Path(__file__).parent))
samples = importlib.import_module("tests.world.tools_for_tests")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Size:
    width: int
    height: int = 1


class Address(TypedDict):
    street: str
    number: int


class Person(BaseModel):
    """Somebody."""

    title: str
    age: int = Field(ge=0)


class Node(BaseModel):
    value: int
    children: list["Node"] = []


def schema_of(function):
    return tool(function).info()["function"]["parameters"]


def test_a_bare_decorator_makes_a_tool_from_signature_and_docstring():
    assert samples.add.info() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first number"},
                    "b": {"default": 2, "type": "integer", "description": "the second number"},
                },
                "required": ["a"],
            },
        },
    }


def test_a_tool_is_called_like_its_function():
    assert samples.add(1) == 3
    assert samples.add(a=1, b=5) == 6


async def test_an_async_tool_is_awaited_like_its_function():
    assert await samples.echo("hi") == "hi"


def test_options_override_name_timeout_and_length():
    assert (samples.move.name, samples.move.timeout, samples.move.max_chars) == ("where", 5, 200)


def test_a_description_can_be_given():
    @tool(description="Other words.")
    def look(at: str) -> str:
        """Words."""
        return at

    assert look.description == "Other words."


def test_every_docstring_style_describes_parameters():
    def google(city: str):
        """Weather of a city.

        Longer text.

        Args:
            city: which
                city

        Returns:
            words
        """

    def numpy(city: str):
        """Weather of a city.

        Longer text.

        Parameters
        ----------
        city : str
            which city
        """

    def rest(city: str):
        """Weather of a city.

        Longer text.

        :param city: which city
        :returns: words
        """

    for function in (google, numpy, rest):
        made = tool(function)
        assert made.description == "Weather of a city.\n\nLonger text."
        assert made.info()["function"]["parameters"]["properties"]["city"]["description"] == "which city"


def test_the_schema_says_literals_optionals_containers_and_defaults():
    def search(
        mode: Literal["fast", "deep"],
        tags: list[str],
        options: dict[str, int],
        limit: Optional[int] = None,  # noqa: UP045 - users write it
        ratio: float = 0.5,
        exact: bool = False,
        anything: Any = None,
    ): ...

    assert schema_of(search) == {
        "type": "object",
        "properties": {
            "mode": {"enum": ["fast", "deep"], "type": "string"},
            "tags": {"items": {"type": "string"}, "type": "array"},
            "options": {"additionalProperties": {"type": "integer"}, "type": "object"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "ratio": {"default": 0.5, "type": "number"},
            "exact": {"default": False, "type": "boolean"},
            "anything": {"default": None},
        },
        "required": ["mode", "tags", "options"],
    }


def test_structures_are_written_out_in_place():
    def register(size: Size, address: Address, person: Person, colour: Colour): ...

    properties = schema_of(register)["properties"]
    assert properties["size"] == {
        "properties": {"width": {"type": "integer"}, "height": {"default": 1, "type": "integer"}},
        "required": ["width"],
        "type": "object",
    }
    assert properties["address"]["required"] == ["street", "number"]
    assert properties["person"] == {
        "description": "Somebody.",
        "properties": {"title": {"type": "string"}, "age": {"minimum": 0, "type": "integer"}},
        "required": ["title", "age"],
        "type": "object",
    }
    assert properties["colour"] == {"enum": ["red", "blue"], "type": "string"}


def test_typed_dicts_are_read_wherever_they_stand():
    class Stop(TypedDict):
        at: Address
        wait: NotRequired[Annotated[int, Field(ge=1)]]

    def drive(stops: list[Stop], home: Optional[Address] = None, last: Stop | None = None) -> Any:  # noqa: UP045
        return stops

    schema = schema_of(drive)["properties"]
    stop = {
        "properties": {
            "at": {
                "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
                "required": ["street", "number"],
                "type": "object",
            },
            "wait": {"minimum": 1, "type": "integer"},
        },
        "required": ["at"],
        "type": "object",
    }
    assert schema["stops"] == {"items": stop, "type": "array"}
    assert schema["home"]["anyOf"] == [stop["properties"]["at"], {"type": "null"}]
    assert schema["last"]["anyOf"] == [stop, {"type": "null"}]
    stops = [{"at": {"street": "High", "number": 1}}]
    assert json.loads(ToolManager([drive])("drive", {"stops": stops})) == stops


def test_a_recursive_structure_keeps_its_definition():
    def walk(node: Node): ...

    schema = schema_of(walk)
    assert schema["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_annotated_fields_and_field_defaults_count():
    def pick(n: Annotated[int, Field(description="how many", ge=1)], of: str = Field(default="all", min_length=2)):
        return f"{n} of {of}"

    assert schema_of(pick)["properties"] == {
        "n": {"description": "how many", "minimum": 1, "type": "integer"},
        "of": {"default": "all", "minLength": 2, "type": "string"},
    }
    assert ToolManager([pick])("pick", {"n": 2}) == "2 of all"


def test_names_that_pydantic_models_reserve_are_plain_parameters():
    def dump(json: str, schema: str, copy: int, _hidden: int = 1, title: str = "t"):
        return f"{json}{schema}{copy}{_hidden}{title}"

    assert list(schema_of(dump)["properties"]) == ["json", "schema", "copy", "_hidden", "title"]
    assert ToolManager([dump])("dump", {"json": "a", "schema": "b", "copy": 3}) == "ab31t"


def test_a_function_without_parameters_has_an_empty_schema():
    def now() -> str:
        return "noon"

    assert schema_of(now) == {"type": "object", "properties": {}}
    assert ToolManager([now])("now") == "noon"


def test_a_default_that_json_cannot_write_is_left_out_of_the_schema():
    def f(x: Any = object): ...

    assert schema_of(f)["properties"] == {"x": {}}


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: lambda: 1, "name="),
        (lambda: f_unannotated, "'x' has no type annotation"),
        (lambda: f_args, "*items cannot be described"),
        (lambda: f_kwargs, "**items cannot be described"),
        (lambda: f_module, "cannot be written as JSON schema"),
        (lambda: f_unknown, "'Nowhere'"),
        (lambda: 3, "made of a function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_at_decoration_in_one_sentence(function, words):
    with pytest.raises((InvalidTypeError, InvalidValueError)) as caught:
        tool(function())
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


def f_unannotated(x): ...
def f_args(*items: int): ...
def f_kwargs(**items: int): ...
def f_module(x: inspect.Signature): ...
def f_unknown(x: "Nowhere"): ...  # noqa: F821 - that is the point


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "two words"},
        {"timeout": 0},
        {"timeout": -1.0},
        {"timeout": math.nan},
        {"max_chars": 0},
        {"parameters": {"type": "array"}},
        {"parameters": {"type": "object", "properties": {"x": {"default": object()}}}},
        {"function": 3},
    ],
)
def test_bad_tools_are_refused(options):
    good = {"name": "t", "description": "", "parameters": {"type": "object"}, "function": len}
    with pytest.raises((InvalidTypeError, InvalidValueError)):
        Tool(**{**good, **options})


def test_an_invalid_schema_is_refused_at_registration():
    broken = Tool("t", "", {"type": "object", "properties": {"x": {"type": "objekt"}}}, len)
    with pytest.raises(InvalidValueError, match="not a valid JSON schema"):
        ToolManager([broken])


def test_what_a_user_does_to_an_info_stays_with_the_user():
    samples.add.info()["function"]["parameters"]["properties"].clear()
    assert list(samples.add.info()["function"]["parameters"]["properties"]) == ["a", "b"]


def test_partials_callable_objects_and_bound_methods_are_tools():
    class Shop:
        def __init__(self):
            self.sold = []

        def sell(self, what: str) -> str:
            """Sell something."""
            self.sold.append(what)
            return f"sold {what}"

    class Greet:
        async def __call__(self, who: str) -> str:
            return f"hi {who}"

    shop = Shop()
    manager = ToolManager([shop.sell, functools.partial(samples.double, 4.0)])
    manager.register(tool(name="greet")(Greet()))
    assert manager("sell", {"what": "tea"}) == "sold tea"
    assert shop.sold == ["tea"]
    assert manager("greet", {"who": "you"}) == "hi you"


@pytest.mark.parametrize("one", [samples.add, samples.move, samples.echo, calculator])
def test_decorated_tools_pickle(one):
    again = pickle.loads(pickle.dumps(one))
    assert again.info() == one.info()
    assert (again.timeout, again.max_chars, again.is_async) == (one.timeout, one.max_chars, one.is_async)
    assert again.function is one.function


def test_a_tool_of_a_plain_function_pickles():
    assert pickle.loads(pickle.dumps(tool(samples.double)))(2.0) == 4.0
    assert samples.double.__qualname__ == "double"


def test_a_manager_pickles_also_after_use():
    manager = ToolManager([samples.add, calculator, samples.double], timeout=3, max_tool_chars=500, concurrency=2)
    assert manager("add", {"a": 1}) == "3"
    again = pickle.loads(pickle.dumps(manager))
    assert again.names == ["add", "calculator", "double"]
    assert (again.timeout, again.max_tool_chars, again.concurrency) == (3, 500, 2)
    assert again("add", {"a": 1}) == "3"


def test_the_calculator_is_described_byte_for_byte():
    assert json.dumps(calculator.info()) == (
        '{"type": "function", "function": {"name": "calculator", "description": "Compute one binary operation, such '
        'as \'12 + 7\'. Longer sums need several calls.", "parameters": {"type": "object", "properties": '
        '{"expression": {"type": "string", "description": "Two numbers with one of + - * / between them."}}, '
        '"required": ["expression"]}}}'
    )


_annotations = st.sampled_from(
    [
        (int, st.integers(-(2**60), 2**60)),
        (float, st.floats(allow_nan=False, allow_infinity=False)),
        (str, st.text()),
        (bool, st.booleans()),
        (list[int], st.lists(st.integers(-9, 9))),
        (dict[str, str], st.dictionaries(st.text(), st.text())),
        (int | None, st.none() | st.integers(-9, 9)),
        (Literal["a", 1], st.sampled_from(["a", 1])),
    ]
)
_names = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True).filter(lambda n: n.isidentifier() and n not in KEYWORDS)
KEYWORDS = {"as", "if", "in", "is", "or", "and", "def", "del", "for", "not", "try", "elif", "else", "from", "pass"} | {
    *("with", "async", "await", "break", "class", "raise", "while", "yield", "assert", "except", "global", "import"),
    *("lambda", "return", "finally", "continue", "nonlocal"),
}


@given(st.data())
def test_arguments_of_the_annotated_types_arrive_as_they_were_sent(data):
    kinds = data.draw(st.dictionaries(_names, _annotations, min_size=1, max_size=5))
    sent = {name: data.draw(values) for name, (_, values) in kinds.items()}
    got = {}

    def function(**arguments):
        got.update(arguments)

    keyword_only = inspect.Parameter.KEYWORD_ONLY
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(name, keyword_only, annotation=kind) for name, (kind, _) in kinds.items()]
    )
    made = tool(function)
    assert list(made.info()["function"]["parameters"]["properties"]) == list(kinds)
    assert made.problem(sent) is None
    positional, keyword = made.bind(sent)
    function(*positional, **keyword)
    assert got == sent


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.none() | st.integers() | st.text() | st.lists(st.none())))
def test_arguments_are_accepted_exactly_when_the_schema_admits_them(arguments):
    integers = {key: value for key, value in arguments.items() if type(value) is int}
    right = arguments == integers and "a" in arguments and "c" not in arguments
    problem = samples.add.problem(arguments)
    assert (problem is None) == right
    if problem is not None:
        assert "\n" not in problem
        assert len(problem) < 1000
