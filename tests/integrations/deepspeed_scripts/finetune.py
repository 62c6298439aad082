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
    labels: int = dataclasses.field(default=0, metadata={"help": "Classify, by a new head."})
    vocabulary: int = dataclasses.field(default=0, metadata={"help": "Resize embeddings."})
    lora: bool = False
    generate: bool = False
    load_first: bool = dataclasses.field(default=False, metadata={"help": "A common mistake."})


def rows(count, labels):
    drawn = torch.Generator().manual_seed(1)
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


def main():
    parser = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
    if parser.parse_known_args()[0].load_first:
        model_args, = transformers.HfArgumentParser(ModelArguments).parse_args_into_dataclasses(
            return_remaining_strings=True
        )[:1]
        model = load(model_args)
    model_args, training_args = parser.parse_args_into_dataclasses()
    transformers.set_seed(training_args.seed)
    if not model_args.load_first:
        model = load(model_args)
    data = rows(32, model_args.labels)
    trainer = transformers.Trainer(
        model=model, args=training_args, train_dataset=data, eval_dataset=data[:6]
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    found = {"log": trainer.state.log_history, "eval": trainer.evaluate()["eval_loss"]}
    if model_args.generate:
        # Ranks whose prompts end after other numbers of tokens.
        wanted = 2 + 3 * trainer.args.process_index
        prompt = data[0]["input_ids"][None].to(trainer.args.device)
        told = trainer.model.generate(prompt, max_new_tokens=wanted, do_sample=False)
        found["generated"] = told.tolist()
    out = pathlib.Path(training_args.output_dir)
    (out / f"found-{trainer.args.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
