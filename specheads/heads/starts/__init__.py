"""Where drafts start in a training row: every position, sampled anchors, and the labels at each depth."""
