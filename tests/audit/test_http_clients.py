"""Claims about clients by HTTP: what they send, how they read the tokens, and what they refuse."""

import math
import time
from dataclasses import replace

import pytest

from specheads.audit.acceptance import of_answers
from specheads.audit.clients.client import Place
from specheads.audit.clients.http import LlamaCppClient, OpenAIClient, ServerError, SGLangClient
from specheads.audit.clients.openvino import OpenVinoServer
from specheads.audit.clients.text import TextClient, TransformersServe
from specheads.audit.settings import Settings
from specheads.decoding.results import AcceptanceCounts
from tests.support.openai_server import serving

SETTINGS = Settings(0.7, top_p=0.9, max_tokens=4, eos=frozenset({2}))


def ask(make, reply, prompts=((1, 5), (1, 6)), settings=SETTINGS):
    """The answers and the requests, each with its route and headers."""
    requests = []

    def answer(route, body, headers):
        requests.append((route, body, headers))
        return reply(body)

    with serving(answer) as url:
        client = make(url)
        client.delay = 0.01
        return [one.tokens for one in client.ask([list(prompt) for prompt in prompts], settings)], requests


def test_an_openai_server_is_sent_ids_and_every_sampler():
    answers, requests = ask(
        lambda url: OpenAIClient(url, "m", key="secret"),
        lambda body: (200, {"choices": [{"token_ids": [body["prompt"][-1], 2]}]}),
    )
    assert answers == [[5, 2], [6, 2]]
    route, body, headers = requests[0]
    assert route == "completions" and headers["Authorization"] == "Bearer secret"
    assert body["temperature"] == 0.7 and body["top_k"] == 0 and body["stop_token_ids"] == [2]
    assert len(requests) == 2


def test_llama_cpp_leaves_out_the_eos_which_is_put_back():
    answers, requests = ask(LlamaCppClient, lambda body: (200, {"tokens": [7], "stop_type": "eos"}))
    assert answers == [[7, 2], [7, 2]]
    assert requests[0][1]["samplers"][:2] == ["penalties", "temperature"] and requests[0][1]["return_tokens"]


def test_a_busy_server_is_asked_again():
    replies = [(503, "busy"), (200, {"tokens": [7, 8, 9, 7]})]
    answers, requests = ask(LlamaCppClient, lambda body: replies.pop(0), prompts=[(1, 5)])
    assert answers == [[7, 8, 9, 7]] and len(requests) == 2


def test_a_slow_server_has_time_for_each_token_and_is_asked_once():
    """An answer takes 0.4 s. 4 tokens of 2 requests at 2 s each are 16 s; at 0.01 s they are 0.08 s."""
    for patience, words in ((2.0, None), (0.01, "no answer within 0 s; see its log")):
        requests = []

        def reply(route, body, headers, requests=requests):
            requests.append(route)
            time.sleep(0.4)
            return 200, {"tokens": [7, 8, 9, 7]}

        with serving(reply) as url:
            client = LlamaCppClient(url, timeout=0.0, patience=patience)
            if words is None:
                assert [answer.tokens for answer in client.ask([[1, 5], [1, 6]], SETTINGS)] == [[7, 8, 9, 7]] * 2
            else:
                with pytest.raises(ServerError, match=words):
                    client.ask([[1, 5], [1, 6]], SETTINGS)
        assert len(requests) == 2


def test_a_busy_server_is_asked_until_the_time_is_over_and_a_broken_one_as_often_as_it_is_told():
    for code, times in ((503, 6), (500, 3)):
        replies = [(code, "no")] * (times - 1) + [(200, {"tokens": [7, 8, 9, 7]})]

        def reply(route, body, headers, replies=replies):
            return replies.pop(0) if replies else (500, "again")

        with serving(reply) as url:
            client = LlamaCppClient(url, retries=2)
            client.delay = 0.005
            assert client.ask([[1, 5]], SETTINGS)[0].tokens == [7, 8, 9, 7] and not replies
            replies[:] = [(code, "no")] * 50
            client.timeout, client.patience = 4.0, 0.0
            with pytest.raises(ServerError, match=f"HTTP {code}: no"):
                client.ask([[1, 5]], SETTINGS)
            assert code == 503 or len(replies) == 47


@pytest.mark.parametrize(
    ("make", "reply", "words"),
    [
        (lambda url: OpenAIClient(url, "m"), (200, {"choices": [{"text": "a"}]}), "return_token_ids"),
        (LlamaCppClient, (200, {"content": "a"}), "return_tokens"),
        (LlamaCppClient, (404, "no such route"), "HTTP 404: .*no such route"),
    ],
)
def test_an_answer_without_tokens_is_one_clear_line(make, reply, words):
    with pytest.raises(ServerError, match=words):
        ask(make, lambda body: reply, prompts=[(1, 5)])


def test_an_address_without_a_scheme_is_refused():
    with pytest.raises(ValueError, match="http://localhost:8000"):
        OpenAIClient("localhost:8000", "m")


def test_sglang_says_how_often_a_text_was_verified():
    """A first token and 2 passes for 6 tokens: 3 of them were drafted."""
    for drafts, passes in (
        ("spec_draft_token_num", "spec_accept_histogram"), ("spec_num_proposed_drafts", "spec_correct_drafts_histogram")
    ):  # fmt: skip
        meta = {"spec_verify_ct": 2, drafts: 8, passes: [0, 1, 1]}
        reply = {"output_ids": [7] * 6, "text": "a", "meta_info": meta}
        with serving(lambda route, body, headers, reply=reply: (200, reply)) as url:
            client = SGLangClient(url)
            answer = client.ask([[1, 5]], SETTINGS)[0]
        assert answer.tokens == [7] * 6 and answer.accepted == 3 and answer.drafted == 8
        assert answer.by_depth == (2, 1) and of_answers([answer, answer]) == AcceptanceCounts(4, 10, (4, 2))
    assert client.body([1], Settings())["sampling_params"]["top_k"] == -1


def test_openvino_says_what_each_pass_gave():
    """A pass over the prompt, a draft of 2 accepted whole, one rejected. Passes that do not cover the text say
    nothing."""
    client = OpenVinoServer("http://host", "m", 2)
    for gained, places in (
        ([1, 3, 1, 2], (None, None, None, Place.AFTER_DRAFT, None, Place.AFTER_REJECTION)),
        ([1], None),
    ):
        answer = client.read({"choices": [{"token_ids": [7] * 6, "gained": gained}]}, SETTINGS)
        assert answer.tokens == [7] * 6 and answer.places == places


def test_penalties_and_log_probabilities_are_asked_for_and_read():
    asked = Settings(presence_penalty=0.5, frequency_penalty=-1, max_tokens=2, logprobs=True)
    vllm = {"choices": [{"token_ids": [5, 6], "text": "ab", "logprobs": {"token_logprobs": [-1, None]}}]}
    sglang = {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": [[-1.0, 5, None], ["-inf", 6, None]]}}
    llama = {"tokens": [5, 6], "completion_probabilities": [{"id": 5, "logprob": -1.0}, {"id": 6}]}
    for client, reply, name in (
        (OpenAIClient("http://host", "m"), vllm, "logprobs"), (SGLangClient("http://host"), sglang, "return_logprob"),
        (LlamaCppClient("http://host"), llama, "n_probs"),
    ):  # fmt: skip
        way = replace(asked, count_prompt=isinstance(client, LlamaCppClient))
        body = client.body([1], way)
        sent = body.get("sampling_params", body)
        assert (sent["presence_penalty"], sent["frequency_penalty"]) == (0.5, -1) and body[name]
        first, second = client.read(reply, way).logprobs
        assert first == -1 and math.isnan(second)
    with pytest.raises(ValueError, match="count_prompt"):
        client.body([1], asked)
    with pytest.raises(ValueError, match="penalties"):
        TextClient("http://host", "m", None).body([1], replace(asked, temperature=0.0))


def test_settings_are_read_from_words():
    found = Settings.read("temperature=0.7 top_k=5 stop='a b' stop=c logprobs", eos=frozenset({2}), count_prompt=True)
    assert found == Settings(0.7, top_k=5, stop=("a b", "c"), logprobs=True, eos=frozenset({2}), count_prompt=True)
    for text, words in (("top_q=1", "did you mean 'top_p'"), ("top_k=x", "top_k is no int"), ("logprobs=2", "no bool")):
        with pytest.raises(ValueError, match=words):
            Settings.read(text)


class Letters:
    pad_token_id = 0

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(chr(97 + token) for token in tokens if not (skip_special_tokens and token == 2))

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [ord(letter) - 97 for letter in text]}


@pytest.mark.parametrize("make", [TextClient, TransformersServe])
def test_text_is_read_where_it_tells_its_tokens(make):
    greedy = Settings(0.0, max_tokens=4, eos=frozenset({2}))
    texts = {"bf": ("hi", "stop", 3), "bg": ("hij", "length", 4)}  # the second has a token that the text does not show

    def reply(route, body, headers):
        text, reason, count = texts[body["prompt"]]
        return 200, {"choices": [{"text": text, "finish_reason": reason}], "usage": {"completion_tokens": count}}

    with serving(reply) as url:
        client = make(url, "m", Letters())
        answers = client.ask([[1, 5], [1, 6]], greedy)
    assert answers[0].tokens == [7, 8, 2] and answers[1].tokens == [] and answers[1].text == "hij"
    with pytest.raises(ValueError, match="temperature 0"):
        client.body([1], Settings(1.0))
