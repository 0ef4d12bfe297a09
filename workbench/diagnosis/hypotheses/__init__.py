"""Hypotheses about what ran instead: edits of an operation's formula, generated, tried and ranked in one way for all.

    edits      `Edit(place, kind, detail)`, and `apply` to a formula
    functions  families of functions, orders of columns, conventions, roundings: by name
    generate   `edits_of(formula, Choices(…))`: every single edit
    operands   other tensors that may have been read, by name
    trial      `Tried`: what formulas are tried on (a protocol); `RowTrial`: a row-wise operation, on a sample
    pass_trial `PassTrial`: the same of an operation with a part for each pass
    solve      numbers that an edit leaves open
    search     `single` and `pairs`: screened, solved, ranked, equal ones dropped
    words      sentence, class and figures of edits, made last
    products   products, sums over the ranks, embedding and head: their operands, maps and words

Another operation needs a `Tried` of its own and its `Choices`; a bank then is

    for solved in single(tried, edits_of(tried.formula, choices)):
        words = wording(site, solved.edits)
        yield Variant(words.name, words.kind, words.text, words.fitted, predicted, solved.cost, edits=solved.edits)

Functions that only some operations have are added to `functions.FAMILIES`, sentences to `words`.
"""
