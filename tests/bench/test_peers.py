"""Decoders of `specheads bench` that run in other processes."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.engines import openvino
from specheads.bench.compare.decoder_spec import Cell
from specheads.bench.compare.decoder_texts import DECODERS, load_engine, parse_decoder
from specheads.bench.compare.peer import Peer, PeerError
from specheads.bench.compare.prompt_sets import PromptSet
from tests.support.races import GREEDY, race

pytestmark = pytest.mark.usefixtures("openvino_engine")

FAKE = Path(__file__).parents[1] / "workers" / "fake_peer.py"


def test_an_engine_is_registered_by_its_file(tmp_path, monkeypatch):
    for name in openvino.ENGINE.decoders:
        monkeypatch.delitem(DECODERS, name)
    assert load_engine(Path(openvino.__file__)).worker.is_file() and {"openvino", "openvino-lookup"} < {*DECODERS}
    (tmp_path / "none.py").write_text("")
    with pytest.raises(ValueError, match="has no ENGINE"):
        load_engine(tmp_path / "none.py")
    with pytest.raises(ValueError, match="is not a Python file"):
        load_engine(tmp_path / "absent.py")


@pytest.fixture
def peer(tmp_path):
    found = Peer("fake", [sys.executable, "-I", str(FAKE)], tmp_path / "peers")
    yield found
    found.close()


def test_a_peer_is_started_once_and_its_own_clock_counts(peer):
    assert peer.ask("versions")["pid"] == peer.ask("versions")["pid"]
    decode = peer.decoder("plain", {"base": "x"}, max_new_tokens=2)
    batch = {"input_ids": torch.tensor([[1, 2], [3, 4]]), "attention_mask": torch.ones(2, 2)}
    output = decode(batch, None)
    assert output.tokens == [[2, 2], [4, 4]] and output.seconds == 0.25 and output.statistics["gained"] == 6
    assert decode({**batch, "limits": [1, 3]}, None).tokens == [[2], [4, 4, 4]]


def test_a_peer_that_refuses_or_ends_says_so(peer, tmp_path):
    batch = {"input_ids": torch.tensor([[1]]), "attention_mask": torch.ones(1, 1)}
    with pytest.raises(PeerError, match="fake: no such mode"):
        peer.decoder("plain", {}, max_new_tokens=1, options={"fails": True})(batch, None)
    assert peer.opened == {}  # what failed is opened anew
    decode = peer.decoder("plain", {}, max_new_tokens=1)
    decode(batch, None)
    with pytest.raises(PeerError, match="ended with code 7"):
        peer.ask("die")
    assert decode(batch, None).tokens == [[1]] and [*peer.opened] == ["plain"]  # started and opened again
    with pytest.raises(PeerError, match="does not start"):
        Peer("gone", [str(tmp_path / "python")], tmp_path).ask("versions")


def test_openvino_is_one_of_the_decoders_in_turn(setup, tmp_path, peer, monkeypatch):
    setup.peers["openvino"] = peer
    # The published form has no place for the layers of so small a head.
    monkeypatch.setattr(
        openvino, "export", lambda config, base, head, out, to, **options: Path(out).mkdir(parents=True)
    )
    asked, ask = [], peer.ask

    def convert(op, **arguments):
        if op == "convert":
            Path(arguments["out"]).mkdir(parents=True)
            asked.append((Path(arguments["model"]).name, arguments.get("layers")))
        return ask(op, **arguments)

    peer.ask = convert
    names, sets = ("openvino", "openvino:2:eagle3"), [PromptSet("p", [[5, 6], [7, 8]], [None, None])]
    outcome = race(setup, tmp_path, names, sets, reference="plain", batch=(1, 2))
    assert outcome.complete and outcome.left_out == {}
    assert all(one["decoders"]["openvino"]["seconds"] == 0.25 for one in outcome.rounds)
    taps = setup.drafter("eagle3").layers
    assert asked == [("base", None), (asked[1][0], [layer - 1 for layer in taps])]
    assert not list(peer.folder.glob("*-p*"))  # neither half an export nor the published form between
    peer.opened.clear()
    race(setup, tmp_path / "again", names, sets, reference="plain", batch=(1, 2))
    assert len(asked) == 2  # exports are made once


def test_openvino_says_what_it_needs():
    sampled = Cell("p", 1, 0.8)
    assert "does not sample" in parse_decoder("openvino-lookup").refusal(sampled)
    assert "do not sample" in parse_decoder("openvino:16:h:4:4").refusal(sampled)
    assert parse_decoder("openvino:16:h:4:4").refusal(GREEDY) is parse_decoder("openvino:5:h").refusal(sampled) is None


def test_openvino_takes_no_other_head(setup, tmp_path, peer):
    setup.peers["openvino"] = peer
    (peer.folder).mkdir()
    peer.ask = lambda op, **arguments: Path(arguments["out"]).mkdir(parents=True) if op == "convert" else {}
    with pytest.raises(PeerError, match="'medusa' is none"):
        parse_decoder("openvino:2:medusa").build(setup, GREEDY)
