"""What a job names elsewhere, brought to this machine before it is needed: models and templates. So labelers and
engines see local paths only. Read `models.py` first.
"""
