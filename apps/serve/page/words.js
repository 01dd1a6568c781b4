"use strict";

// What went wrong, in the words of the page: who sits before it knows "Length" and no "max_tokens".
const NAMES = {
  max_tokens: "Length", max_completion_tokens: "Length", temperature: "Temperature", top_p: "Top p", top_k: "Top k",
  repetition_penalty: "Repetition penalty", seed: "Seed", model: "Model", prompt: "The text", messages: "The text",
};
const UNREACHABLE = "The server cannot be reached. Is it still running?";

// An answer that is an error.
// eslint-disable-next-line no-unused-vars
class Refused extends Error {
  constructor(status, error, retryAfter) {
    super(error.message ?? "");
    Object.assign(this, { status, code: error.code ?? "", param: error.param ?? "", retryAfter });
  }

  static async from(response) {
    const { error } = await response.json().catch(() => ({}));
    return new Refused(response.status, error ?? {}, response.headers.get("Retry-After"));
  }
}

// What the form itself says of its fields; "" where all are fine.
// eslint-disable-next-line no-unused-vars
function wrongSetting(fields) {
  const wrong = fields.find((field) => !field.checkValidity());
  if (!wrong) return "";
  const given = wrong.validity.badInput ? "not a number" : wrong.value;
  const range = wrong.max ? `from ${wrong.min} to ${wrong.max}` : `from ${wrong.min} on`;
  return `${NAMES[wrong.id]} is ${given}; give a whole number ${range}, under Settings.`;
}

// eslint-disable-next-line no-unused-vars
function inWords(error, holds) {
  if (error instanceof TypeError) return UNREACHABLE;
  if (!(error instanceof Refused)) return error.message;
  if (error.code === "context_length_exceeded") {
    return `This is too long for the model: it holds ${holds} tokens, what it reads and what it writes together. Shorten the text.`;
  }
  const said = renamed(error.message, error.param);
  switch (error.status) {
    case 401:
      return "The server asks for a key, and this is not it. Put the key in under Settings.";
    case 404:
      return error.code === "model_not_found" ? "This model is no longer served; load the page again." : said;
    case 413:
      return "The text is larger than the server takes. Shorten it.";
    case 429:
      return `Many are asking at once. Try again in ${error.retryAfter ?? "a few"} seconds.`;
    case 503:
      return "The server takes nothing new just now; it may be stopping. Try again in a few seconds.";
    case 504:
      return "The answer took longer than the server allows. Ask for a shorter one: Length, under Settings.";
    case 400:
      return said || "The server refused this.";
    default:
      return `The server failed (${error.status})${said ? `: ${said}` : "."}`;
  }
}

// Names with an underscore are fields of the API wherever they stand; others are words, but for the one at the front.
function renamed(message, param) {
  const front = `${param}: `;
  const said = message.startsWith(front) ? `${NAMES[param] ?? param}: ${message.slice(front.length)}` : message;
  return said.replace(/\b[a-z]+(_[a-z]+)+\b/g, (word) => NAMES[word] ?? word);
}
