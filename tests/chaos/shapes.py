"""The requests of the rounds: a closed list, so that what each gives undisturbed is asked once and known from then on."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb
from tandem_cli.client import connect
from tests.e2e.cells import Answer, ask, fresh_id

#: Undisturbed requests at once.
AT_ONCE = 4
#: A store that lost its memory takes new requests again within so many seconds.
SETTLED_S = 10.0
_STORY = "The ferry left the harbour at dawn and the wind turned north. "


@dataclass(frozen=True, slots=True)
class Shape:
    """One request but for its id. The prompt: `text`, its first `prompt_tokens` tokens, or a user's message."""

    name: str
    max_output_tokens: int
    text: str = _STORY * 30
    prompt_tokens: int = 0
    chat: bool = False
    temperature: float = 0.0
    seed: int = 0
    sampling: dict[str, object] = field(default_factory=dict, hash=False)
    stop: dict[str, object] = field(default_factory=lambda: {"ignore_eos": True}, hash=False)
    final_only: bool = False

    def request(self, request_id: str, tokenizer: Tokenizer) -> pb.GenerateRequest:
        """The message."""
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=pb.SamplingParams(temperature=self.temperature, seed=self.seed, **self.sampling),
            stop=pb.StopParams(**self.stop),
            max_output_tokens=self.max_output_tokens,
            output_mode=pb.OUTPUT_MODE_FINAL_ONLY if self.final_only else pb.OUTPUT_MODE_DELTA,
            utf8_policy=pb.UTF8_POLICY_DROP,
        )
        if self.prompt_tokens:
            request.tokens.ids.extend(tokenizer.encode(self.text)[: self.prompt_tokens])
        elif self.chat:
            request.chat.messages.add(role="user", content=self.text)
        else:
            request.text = self.text
        return request


#: Lengths at a page's border, prompts of one, two and several chunks, every way to choose a token and to end.
SHAPES = (
    Shape("one token in", 24, prompt_tokens=1),
    Shape("below a page", 24, prompt_tokens=15, temperature=0.8, seed=11),
    Shape("a whole page", 32, prompt_tokens=16),
    Shape("above a page", 32, prompt_tokens=17, temperature=1.2, seed=12, sampling={"top_k": 40}),
    Shape("two chunks", 40, prompt_tokens=150),
    Shape("two chunks, drawn", 40, prompt_tokens=200, temperature=0.9, seed=13, sampling={"top_p": 0.9}),
    Shape("four chunks", 24, prompt_tokens=400),
    Shape("four chunks, drawn", 48, prompt_tokens=390, temperature=0.7, seed=14, sampling={"min_p": 0.05}),
    Shape("one token out", 1, prompt_tokens=60),
    Shape("penalties", 48, text="Numbers: 1, 2, 3, 4,", temperature=1.0, seed=15, sampling={"repetition_penalty": 1.3}),
    Shape("counted penalties", 32, text="la la la la", seed=16, sampling={"presence_penalty": 1.0, "frequency_penalty": 0.7}),
    Shape("a stop", 64, text="One day, a girl", stop={"ignore_eos": True, "sequences": [". "], "min_output_tokens": 8}),
    Shape("chat", 40, text="Name three rivers and say where they rise.", chat=True, stop={}),
    Shape("other scripts", 40, text="日本語のテキスト 🎉🚢 καλημέρα. Repeat it: 日本語のテキスト 🎉🚢", temperature=0.3, seed=17),
    Shape("all at the end", 32, text="Dear reader,", temperature=0.8, seed=18, final_only=True),
    Shape("long", 96, text="Chapter one.", temperature=0.6, seed=19),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a shape gives undisturbed."""

    text: str
    matched_stop: str
    finish_reason: int
    prompt_tokens: int
    selected_tokens: int
    returned_tokens: int


class Undisturbed:
    """Results by shape, asked for when first needed."""

    def __init__(self) -> None:
        self._known: dict[str, Expected] = {}

    def __getitem__(self, shape: Shape) -> Expected:
        return self._known[shape.name]

    async def learn(self, shapes: Iterable[Shape], address: str, tokenizer: Tokenizer) -> None:
        """Ask a router, at rest, for those that are not known yet."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def answered(shape: Shape) -> Answer:
            """A store that lost its memory in the round before takes no new request at first."""
            until = time.monotonic() + SETTLED_S
            while True:
                answer = await ask(stub, shape.request(fresh_id("undisturbed"), tokenizer))
                if answer.status is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > until:
                    return answer
                await asyncio.sleep(0.2)

        async def one(shape: Shape) -> None:
            async with gate:
                answer = await answered(shape)
            assert answer.completed is not None, f"{shape.name} undisturbed: {answer.status} {answer.details}"
            assert answer.completed.state == pb.REQUEST_STATE_FINISHED, f"{shape.name} undisturbed: {answer.completed}"
            usage = answer.completed.usage
            self._known[shape.name] = Expected(
                answer.text,
                answer.completed.matched_stop,
                answer.completed.finish_reason,
                usage.prompt_tokens,
                usage.selected_tokens,
                usage.returned_tokens,
            )

        async with connect(address) as stub:
            await asyncio.gather(*(one(shape) for shape in {s.name: s for s in shapes}.values() if shape.name not in self._known))
