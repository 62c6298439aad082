"""Integrations: infinity as the offload backend of other trainers.

    infinity.integrations.transformers   Trainer, Seq2SeqTrainer, and TRL's trainers
    infinity.integrations.accelerate     scripts with an Accelerator
    infinity.integrations.peft           adapters over an offloaded base
    infinity.integrations.lightning      Trainer and Fabric: strategy="infinity"
    infinity.integrations.torchtitan     parallelize function and optimizers (experimental)

Each module requires only its own trainer and uses only infinity's public names, as a trainer that
you write would. This package imports nothing. docs/embedding.md explains how to embed a trainer.
"""
