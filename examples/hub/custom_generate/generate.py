"""transformers loads this file: `model.generate(**inputs, custom_generate="REPOSITORY", trust_remote_code=True)`."""

import specheads


def generate(model, draft="lookup", tree=None, accept=None, custom_generate=None, **kwargs):
    """`model.generate` with drafts: the same text in fewer passes. Returns what generate() returns.

    draft: "lookup" copies from the text so far and needs no training; "ngram", "maxgram", a head's folder or hub id,
    "model:PATH". tree, accept: as in `specheads.generate`. Other arguments are those of generate().
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    if custom_generate is not None:  # the loop of specheads, or another's, calls a model that was loaded with this file
        return type(model).generate(model, custom_generate=custom_generate, **given)
    if isinstance(model, specheads.SpecModel):
        return model.generate(draft=draft, tree=tree, accept=accept, **given)
    return specheads.generate(model, draft=draft, tree=tree, accept=accept, **given)
