// Versions of a question: an edit keeps the earlier one with all that followed it. What is shown stands in `talk.messages`;
// the rest of the others in `versions` of the question.

// Begin another version of a question of `talk`, without anything behind it.
export function fork(talk, message, text) {
  message.versions ??= [{ content: message.content, files: message.files, rest: [] }];
  message.version ??= 0;
  put(talk, message);
  message.versions.push({ content: text, files: message.files, rest: [] });
  message.version = message.versions.length - 1;
  message.content = text;
}

// Show another version of a question, and what followed it.
export function turn(talk, message, step) {
  put(talk, message);
  message.version += step;
  const { content, files, rest } = message.versions[message.version];
  Object.assign(message, { content, files });
  talk.messages.push(...rest);
}

function put(talk, message) {
  message.versions[message.version].rest = talk.messages.splice(talk.messages.indexOf(message) + 1);
}
