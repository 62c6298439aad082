"""Integrations: the engine as the offload backend of other trainers.

    infinity.integrations.transformers   Trainer, Seq2SeqTrainer, and TRL's trainers
    infinity.integrations.accelerate     scripts with an Accelerator
    infinity.integrations.peft           adapters over an offloaded base
    infinity.integrations.lightning      Trainer and Fabric: strategy="infinity"
    infinity.integrations.torchtitan     parallelize function and optimizers (experimental)

Each module needs its trainer alone, and imports nothing of the engine but its public names, as a
trainer of your own would. This one imports nothing. docs/embedding.md says how a trainer is
embedded.
"""
