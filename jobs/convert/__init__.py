"""Convert: labels, qrels, run files, JSONL and Parquet into each other, and labels of `route` into trajectories. Owns
what each form can hold and which rows are left out; how TREC lines look is `manifests/gold.py`. Read
`converting.py` first; of trajectories, `trajectories.py`.
"""
