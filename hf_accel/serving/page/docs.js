// The page at /docs: each route of /openapi.json with the fields of its body.
"use strict";

const made = (tag, text, ...inside) => {
  const element = document.createElement(tag);
  element.textContent = text;
  element.append(...inside);
  return element;
};

function type(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  const parts = schema.anyOf ?? schema.oneOf;
  if (parts) return parts.map(type).filter((one) => one !== "null").join(" or ");
  if (schema.type === "array") return `list of ${type(schema.items ?? {})}`;
  return schema.type ?? "anything";
}

function bounds(schema) {
  const found = [];
  for (const part of schema.anyOf ?? [schema]) {
    for (const [name, sign] of [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]]) {
      if (name in part) found.push(`${sign} ${part[name]}`);
    }
  }
  return found.join(", ");
}

function fields(schema, needed = schema.required ?? []) {
  const table = document.createElement("table");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const row = table.insertRow();
    row.append(made("td", name), made("td", type(field)), made("td", needed.includes(name) ? "needed" : bounds(field)));
    row.append(made("td", field.description ?? ""));
  }
  return table;
}

async function show() {
  const described = await (await fetch("openapi.json")).json();
  const schemas = described.components.schemas;
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const card = made("section", "", made("h3", `${method.toUpperCase()} ${path}`), made("p", operation.summary));
      const content = Object.values(operation.requestBody?.content ?? {})[0];
      if (content) card.append(fields(content.schema.$ref ? schemas[type(content.schema)] : content.schema));
      document.getElementById("routes").append(card);
    }
  }
}

show().catch((error) => { document.getElementById("status").textContent = error.message; });
