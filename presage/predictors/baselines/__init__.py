"""What the predictor is compared with: the predictor as published, boosted trees, and the families of PBKV's table 3.

PBKV (Zheng et al., arXiv 2605.06472), appendix C.2, compares kNN, a linear probe, MLPs, TCNs, Transformers and R-GCN
with its own predictor. It names them, cites a source for the last three and leaves sizes, inputs and training open;
each module says what we took. n-grams, which are a component of ours as well, stand in `predictors/ngram.py`.

All families see the same: the agents of the prefix in order, the workflow type, and the semantic states so far, cut to
their principal components. Sizes in tokens and characters, which ours and boosted trees read too, are no input of the
paper's and none here.
"""
