"""Fine-tune a causal language model by transformers' Trainer, as scripts for DeepSpeed do.

    deepspeed finetune.py --model_name_or_path DIR --output_dir OUT --deepspeed ds_config.json ...
"""

import dataclasses
import json
import pathlib

import torch
import transformers


@dataclasses.dataclass
class ModelArguments:
    model_name_or_path: str
    labels: int = dataclasses.field(default=0, metadata={"help": "classify, by a new head"})
    vocabulary: int = dataclasses.field(default=0, metadata={"help": "resize embeddings"})
    lora: bool = False
    generate: bool = False


def rows(count, labels, seed=1):
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        tokens = torch.randint(0, 64, (8,), generator=drawn)
        made.append({"input_ids": tokens, "labels": tokens[0] % labels if labels else tokens})
    return made


def load(model_args):
    path = model_args.model_name_or_path
    if model_args.labels:
        kind = transformers.AutoModelForSequenceClassification
        model = kind.from_pretrained(path, num_labels=model_args.labels, pad_token_id=0)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
    if model_args.vocabulary:
        model.resize_token_embeddings(model_args.vocabulary)
    if model_args.lora:
        import peft

        task = "SEQ_CLS" if model_args.labels else "CAUSAL_LM"
        model = peft.get_peft_model(model, peft.LoraConfig(task_type=task, r=4, lora_alpha=8))
    return model


def main(argv=None):
    parser = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses(argv)
    transformers.set_seed(training_args.seed)
    trainer = transformers.Trainer(
        model=load(model_args),
        args=training_args,
        train_dataset=rows(32, model_args.labels),
        eval_dataset=rows(6, model_args.labels, seed=2),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    found = {"log": trainer.state.log_history, "eval": trainer.evaluate()["eval_loss"]}
    if model_args.generate:
        # Ranks end after other numbers of tokens.
        wanted = 2 + 3 * trainer.args.process_index
        prompt = trainer.train_dataset[0]["input_ids"][None].to(trainer.args.device)
        told = trainer.model.generate(prompt, max_new_tokens=wanted, do_sample=False)
        found["generated"] = told.tolist()
    out = pathlib.Path(training_args.output_dir)
    (out / f"found-{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
