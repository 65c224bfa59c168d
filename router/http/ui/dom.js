// Elements. Text always goes in as text: ids, tenants and outputs are made by others.

/** An element with a class, properties, and children: nodes, or text. */
export function el(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return made;
}

/** The element with an id. */
export const byId = (id) => document.getElementById(id);

/** Sets text only where it changes, so that selections and screen readers are left in peace. */
export function say(element, text) {
  const words = String(text);
  if (element.textContent !== words) element.textContent = words;
}

/** Sets an attribute or property only where it changes. */
export function put(element, name, value) {
  if (element[name] !== value) element[name] = value;
}

/**
 * Makes the children of `parent` those of `items`, in order. A child is kept as long as its key is there:
 * `create(item)` makes it, `update(child, item)` brings it up to date.
 */
export function keyed(parent, items, keyOf, create, update) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let child = before.get(key);
    if (child) {
      before.delete(key);
    } else {
      child = create(item);
      child.dataset.key = key;
    }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, item);
  }
  for (const gone of before.values()) gone.remove();
}

/** The part of an element that carries a name, see `named`. */
export const part = (element, name) => element.querySelector(`[data-part="${name}"]`);

/** Names an element as a part of what holds it. */
export function named(name, element) {
  element.dataset.part = name;
  return element;
}

/** A bar of segments, each {name, value, title}; widths in proportion. `whole`: what fills the bar, unless the sum does. */
export function bar(element, segments, whole = 0) {
  const shown = segments.filter((segment) => segment.value > 0);
  const total = Math.max(whole, shown.reduce((sum, segment) => sum + segment.value, 0));
  keyed(
    element,
    shown,
    (segment) => segment.name,
    (segment) => el("span", `segment ${segment.name}`),
    (child, segment) => {
      const width = `${((100 * segment.value) / total).toFixed(2)}%`;
      if (child.style.width !== width) child.style.width = width;
      put(child, "title", segment.title);
    },
  );
  const label = shown.map((segment) => segment.title).join(", ");
  if (element.getAttribute("aria-label") !== label) element.setAttribute("aria-label", label);
  if (element.getAttribute("role") !== "img") element.setAttribute("role", "img");
}
