"""The standard library as a corpus: what is held out never trains anything."""

from specheads.data import corpus


def test_no_held_out_file_nor_a_copy_of_one_is_in_the_training_texts():
    held_out, train = dict(corpus.texts("held_out")), dict(corpus.texts("train"))
    names = set(corpus.held_out_names())
    assert len(names) >= 50 and len(train) > len(held_out) >= 50
    assert set(held_out) <= names and not names & set(train)
    assert not set(held_out.values()) & set(train.values())


def test_the_two_splits_are_all_of_the_usable_files():
    held_out, train = (dict(corpus.texts(split, ["abc.py", "no such file.py"])) for split in ("held_out", "train"))
    usable = [name for name, path in corpus.stdlib_files().items() if corpus.read_text(path) is not None]
    assert list(held_out) == ["abc.py"]
    assert list(train) == [name for name in usable if name != "abc.py"]
