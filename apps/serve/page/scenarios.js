"use strict";

// Each scenario: what it asks for, what is sent to the model, and sampling that suits it. A model with a chat template
// gets `messages(turns)`, one without gets `prompt(turns)`, a few-shot prompt, and `stop`, where a text of it ends.
// `turns` are the texts so far, [{mine, theirs}, …], the last one with `theirs` still to be written.
// keeps: the model is told the turns before. continues: the answer goes on in the very text, and no template is used.
const asked = (content) => [{ role: "user", content }];

// eslint-disable-next-line no-unused-vars
const SCENARIOS = [
  {
    id: "continue",
    name: "Continue text",
    about:
      "Begin a text, and the model goes on with it in the manner of what it was trained on. The model of make demo has " +
      "read Python and nothing else: give it the beginning of a function.",
    asked: "The text begins",
    example: "def read_lines(path):",
    keeps: false,
    continues: true,
    settings: { max_tokens: 128, temperature: 0.7, top_p: 0.95, top_k: 0, repetition_penalty: 1 },
    prompt: (turns) => turns.at(-1).mine + turns.at(-1).theirs,
  },
  {
    id: "faq",
    name: "FAQ",
    about: "Short answers to questions of fact, each by itself.",
    asked: "Question",
    example: "Why is the sky blue?",
    keeps: false,
    stop: ["\nQ:", "\n\n"],
    settings: { max_tokens: 96, temperature: 0.3, top_p: 0.9, top_k: 0, repetition_penalty: 1.1 },
    prompt: (turns) =>
      "Questions and short, correct answers.\n\n" +
      "Q: How many legs does a spider have?\nA: A spider has eight legs.\n\n" +
      "Q: What is the capital of Japan?\nA: The capital of Japan is Tokyo.\n\n" +
      "Q: What is ice?\nA: Ice is water that has frozen because it is colder than zero degrees Celsius.\n\n" +
      `Q: ${turns.at(-1).mine}\nA:`,
    messages: (turns) => asked(`${turns.at(-1).mine}\n\nAnswer correctly, in one or two sentences.`),
  },
  {
    id: "conversation",
    name: "Conversation",
    about: "A dialogue that remembers what was said before.",
    asked: "You say",
    example: "Hello! What shall we talk about?",
    keeps: true,
    stop: ["\nHuman:", "\nAssistant:"],
    settings: { max_tokens: 128, temperature: 0.8, top_p: 0.95, top_k: 0, repetition_penalty: 1.1 },
    prompt: (turns) =>
      "A conversation between a human and an assistant. The assistant is friendly, honest and brief.\n\n" +
      "Human: Good morning!\nAssistant: Good morning! How can I help you today?\n" +
      turns.map((turn) => `Human: ${turn.mine}\nAssistant:${turn.theirs ? " " + turn.theirs : ""}`).join("\n"),
    messages: (turns) =>
      turns.flatMap((turn) => [
        ...asked(turn.mine),
        ...(turn.theirs ? [{ role: "assistant", content: turn.theirs }] : []),
      ]),
  },
  {
    id: "translation",
    name: "Translation",
    about: "From English into French, a text at a time.",
    asked: "English",
    example: "The weather is beautiful today.",
    keeps: false,
    stop: ["\nEnglish:", "\n\n"],
    settings: { max_tokens: 128, temperature: 0, top_p: 1, top_k: 0, repetition_penalty: 1 },
    prompt: (turns) =>
      "English: Good morning.\nFrench: Bonjour.\n\n" +
      "English: Where is the train station?\nFrench: Où est la gare ?\n\n" +
      "English: I would like a cup of coffee, please.\nFrench: Je voudrais une tasse de café, s'il vous plaît.\n\n" +
      `English: ${turns.at(-1).mine}\nFrench:`,
    messages: (turns) => asked(`Translate into French, and give nothing but the translation:\n\n${turns.at(-1).mine}`),
  },
  {
    id: "essay",
    name: "Essay",
    about: "A longer text on a title of yours.",
    asked: "Title",
    example: "The usefulness of forgetting",
    keeps: false,
    stop: ["\nTitle:"],
    settings: { max_tokens: 384, temperature: 0.9, top_p: 0.95, top_k: 50, repetition_penalty: 1.15 },
    prompt: (turns) =>
      "Title: On walking\nEssay: To walk is to think with the feet. The road gives the mind a rhythm, and the landscape " +
      "gives it something to lose itself in; between the two, thoughts come that would not have come to the desk.\n\n" +
      `Title: ${turns.at(-1).mine}\nEssay:`,
    messages: (turns) => asked(`Write a short essay with the title “${turns.at(-1).mine}”.`),
  },
];
