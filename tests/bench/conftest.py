"""What races of decoders are run with."""

import pytest

from benchmarks.engines import openvino
from specheads.bench.compare.decoder_spec import BenchSetup
from specheads.bench.compare.decoder_texts import DECODERS
from specheads.models.named import Models


@pytest.fixture
def openvino_engine(monkeypatch):
    for name, kind in openvino.ENGINE.decoders.items():
        monkeypatch.setitem(DECODERS, name, kind)


@pytest.fixture
def setup(shipped):
    return BenchSetup(Models.load(str(shipped / "base")), shipped, 4, 8, {})
