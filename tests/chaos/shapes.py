"""The requests of the rounds: a closed list, so that what each gives undisturbed is asked once and known from then on."""

from dataclasses import dataclass, field

from models import Tokenizer
from tandem.v1 import inference_pb2 as pb

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
    choices: int = 0
    best_of: int = 0
    #: A field of the message Grammar and its value.
    grammar: tuple[str, str] | None = None
    adapter: str = ""
    #: From arrival to the end, in seconds; 0: as long as the router allows. What comes before is as without it.
    overall_s: float = 0.0

    @property
    def several(self) -> bool:
        """Whether each output has an end of its own."""
        return max(self.choices, self.best_of) > 1

    def request(self, request_id: str, tokenizer: Tokenizer) -> pb.GenerateRequest:
        """The message."""
        request = pb.GenerateRequest(
            request_id=request_id,
            sampling=pb.SamplingParams(temperature=self.temperature, seed=self.seed, **self.sampling),
            stop=pb.StopParams(**self.stop),
            max_output_tokens=self.max_output_tokens,
            output_mode=pb.OUTPUT_MODE_FINAL_ONLY if self.final_only else pb.OUTPUT_MODE_DELTA,
            utf8_policy=pb.UTF8_POLICY_DROP,
            choices=self.choices or None,
            best_of=self.best_of or None,
            grammar=pb.Grammar(**dict([self.grammar])) if self.grammar else None,
            adapter=self.adapter,
        )
        if self.overall_s:
            request.deadlines.overall.FromMilliseconds(round(self.overall_s * 1000))
        if self.prompt_tokens:
            request.tokens.ids.extend(tokenizer.encode(self.text)[: self.prompt_tokens])
        elif self.chat:
            request.chat.messages.add(role="user", content=self.text)
        else:
            request.text = self.text
        return request

    @property
    def path(self) -> str:
        """Where the HTTP door takes it."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, tokenizer: Tokenizer, *, stream: bool) -> dict[str, object]:
        """The same for the HTTP door, by its names; the id is a header there. Shapes with a grammar or an adapter have none."""
        assert self.grammar is None and not self.adapter
        values: dict[str, object] = {"max_tokens": self.max_output_tokens, "temperature": self.temperature, "seed": self.seed}
        values |= {**self.sampling, **{_STOP_NAMES.get(name, name): value for name, value in self.stop.items()}}
        values |= {name: value for name, value in (("n", self.choices), ("best_of", self.best_of)) if value}
        if self.chat:
            values["messages"] = [{"role": "user", "content": self.text}]
        else:
            values["prompt"] = tokenizer.encode(self.text)[: self.prompt_tokens] if self.prompt_tokens else self.text
        if stream:
            values |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        return values


#: Fields of StopParams by their names at the HTTP door, where these differ.
_STOP_NAMES = {"sequences": "stop", "min_output_tokens": "min_tokens"}
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
#: Several outputs of one prompt, drawn: told side by side, and the likeliest of more when all have ended.
SHAPES_OF_CHOICES = (
    Shape("two choices", 32, prompt_tokens=40, temperature=0.9, seed=20, choices=2),
    Shape("two choices of a long prompt", 40, prompt_tokens=300, temperature=0.8, seed=21, sampling={"top_p": 0.9}, choices=2),
    Shape(
        "two choices that stop",
        64,
        text="One day, a girl",
        temperature=0.7,
        seed=22,
        stop={"ignore_eos": True, "sequences": [". "], "min_output_tokens": 8},
        choices=2,
    ),
    Shape("the likeliest of two", 24, prompt_tokens=33, temperature=1.0, seed=23, final_only=True, choices=1, best_of=2),
    Shape("two of three", 24, text="Dear reader,", temperature=0.9, seed=24, final_only=True, choices=2, best_of=3),
)
#: Conversations, as most of them come to the HTTP door.
SHAPES_OF_CHATS = (
    Shape("chat, drawn", 48, text="Tell me of a harbour at dawn.", chat=True, temperature=0.8, seed=25, sampling={"top_p": 0.9}),
    Shape("chat of two chunks", 32, text=_STORY * 12, chat=True, temperature=0.6, seed=26),
    Shape("chat in two choices", 32, text="Name a river.", chat=True, temperature=0.9, seed=27, choices=2),
)
