"""Texts to measure and to calibrate with: openings of works in the public domain, and a few plain lines.

No text is in both. They are as common editions have them, without emphasis marks."""

from __future__ import annotations

EVALUATION = (
    # Lewis Carroll, Alice's Adventures in Wonderland (1865)
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having "
    "nothing to do: once or twice she had peeped into the book her sister was reading, but it had no"
    ' pictures or conversations in it, "and what is the use of a book," thought Alice, "without '
    'pictures or conversations?" So she was considering in her own mind (as well as she could, for '
    "the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain"
    " would be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit"
    " with pink eyes ran close by her. There was nothing so very remarkable in that; nor did Alice "
    'think it so very much out of the way to hear the Rabbit say to itself, "Oh dear! Oh dear! I '
    'shall be late!" (when she thought it over afterwards, it occurred to her that she ought to have'
    " wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually "
    "took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started "
    "to her feet, for it flashed across her mind that she had never before seen a rabbit with either"
    " a waistcoat-pocket, or a watch to take out of it, and burning with curiosity, she ran across "
    "the field after it, and fortunately was just in time to see it pop down a large rabbit-hole "
    "under the hedge. In another moment down went Alice after it, never once considering how in the "
    "world she was to get out again. The rabbit-hole went straight on like a tunnel for some way, "
    "and then dipped suddenly down, so suddenly that Alice had not a moment to think about stopping "
    "herself before she found herself falling down a very deep well.",
    # Jane Austen, Pride and Prejudice (1813)
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must"
    " be in want of a wife. However little known the feelings or views of such a man may be on his "
    "first entering a neighbourhood, this truth is so well fixed in the minds of the surrounding "
    "families, that he is considered as the rightful property of some one or other of their "
    'daughters. "My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield'
    ' Park is let at last?" Mr. Bennet replied that he had not. "But it is," returned she; "for Mrs.'
    ' Long has just been here, and she told me all about it." Mr. Bennet made no answer. "Do not you'
    ' want to know who has taken it?" cried his wife impatiently. "You want to tell me, and I have '
    'no objection to hearing it." This was invitation enough. "Why, my dear, you must know, Mrs. '
    "Long says that Netherfield is taken by a young man of large fortune from the north of England; "
    "that he came down on Monday in a chaise and four to see the place, and was so much delighted "
    "with it that he agreed with Mr. Morris immediately; that he is to take possession before "
    'Michaelmas, and some of his servants are to be in the house by the end of next week."',
    # Herman Melville, Moby-Dick (1851)
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my"
    " purse, and nothing particular to interest me on shore, I thought I would sail about a little "
    "and see the watery part of the world. It is a way I have of driving off the spleen and "
    "regulating the circulation. Whenever I find myself growing grim about the mouth; whenever it is"
    " a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before "
    "coffin warehouses, and bringing up the rear of every funeral I meet; and especially whenever my"
    " hypos get such an upper hand of me, that it requires a strong moral principle to prevent me "
    "from deliberately stepping into the street, and methodically knocking people's hats off, then, "
    "I account it high time to get to sea as soon as I can. This is my substitute for pistol and "
    "ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to the "
    "ship. There is nothing surprising in this. If they but knew it, almost all men in their degree,"
    " some time or other, cherish very nearly the same feelings towards the ocean with me.",
    # Arthur Conan Doyle, A Scandal in Bohemia (1891)
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other"
    " name. In his eyes she eclipses and predominates the whole of her sex. It was not that he felt "
    "any emotion akin to love for Irene Adler. All emotions, and that one particularly, were "
    "abhorrent to his cold, precise but admirably balanced mind. He was, I take it, the most perfect"
    " reasoning and observing machine that the world has seen, but as a lover he would have placed "
    "himself in a false position. He never spoke of the softer passions, save with a gibe and a "
    "sneer. They were admirable things for the observer, excellent for drawing the veil from men's "
    "motives and actions. But for the trained reasoner to admit such intrusions into his own "
    "delicate and finely adjusted temperament was to introduce a distracting factor which might "
    "throw a doubt upon all his mental results.",
    # H. G. Wells, The War of the Worlds (1898)
    "No one would have believed in the last years of the nineteenth century that this world was "
    "being watched keenly and closely by intelligences greater than man's and yet as mortal as his "
    "own; that as men busied themselves about their various concerns they were scrutinised and "
    "studied, perhaps almost as narrowly as a man with a microscope might scrutinise the transient "
    "creatures that swarm and multiply in a drop of water. With infinite complacency men went to and"
    " fro over this globe about their little affairs, serene in their assurance of their empire over"
    " matter. It is possible that the infusoria under the microscope do the same. No one gave a "
    "thought to the older worlds of space as sources of human danger, or thought of them only to "
    "dismiss the idea of life upon them as impossible or improbable.",
)

CALIBRATION = (
    # Charles Dickens, A Tale of Two Cities (1859)
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age "
    "of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season "
    "of Light, it was the season of Darkness, it was the spring of hope, it was the winter of "
    "despair, we had everything before us, we had nothing before us, we were all going direct to "
    "Heaven, we were all going direct the other way. There were a king with a large jaw and a queen "
    "with a plain face, on the throne of England; there were a king with a large jaw and a queen "
    "with a fair face, on the throne of France. In both countries it was clearer than crystal to the"
    " lords of the State preserves of loaves and fishes, that things in general were settled for "
    "ever.",
    # Declaration of Independence (1776)
    "When in the Course of human events, it becomes necessary for one people to dissolve the "
    "political bands which have connected them with another, and to assume among the powers of the "
    "earth, the separate and equal station to which the Laws of Nature and of Nature's God entitle "
    "them, a decent respect to the opinions of mankind requires that they should declare the causes "
    "which impel them to the separation. We hold these truths to be self-evident, that all men are "
    "created equal, that they are endowed by their Creator with certain unalienable Rights, that "
    "among these are Life, Liberty and the pursuit of Happiness. That to secure these rights, "
    "Governments are instituted among Men, deriving their just powers from the consent of the "
    "governed.",
    # Mary Shelley, Frankenstein (1818)
    "You will rejoice to hear that no disaster has accompanied the commencement of an enterprise "
    "which you have regarded with such evil forebodings. I arrived here yesterday, and my first task"
    " is to assure my dear sister of my welfare and increasing confidence in the success of my "
    "undertaking. I am already far north of London, and as I walk in the streets of Petersburgh, I "
    "feel a cold northern breeze play upon my cheeks, which braces my nerves and fills me with "
    "delight. Do you understand this feeling? This breeze, which has travelled from the regions "
    "towards which I am advancing, gives me a foretaste of those icy climes.",
    # Arithmetic, code and a recipe
    "Question: A farmer has 17 sheep and buys 25 more. He sells 8 of them. How many sheep does he "
    "have now? Answer: He starts with 17 sheep. After buying 25 he has 17 + 25 = 42 sheep. After "
    "selling 8 he has 42 - 8 = 34 sheep.\n"
    "\n"
    "def area(width: float, height: float) -> float:\n"
    '    """Return the area of a rectangle."""\n'
    "    if width < 0 or height < 0:\n"
    '        raise ValueError("sides must not be negative")\n'
    "    return width * height\n"
    "\n"
    "1. Boil two litres of water with a pinch of salt.\n"
    "2. Add the noodles and cook them for eight minutes.\n"
    "3. Drain, stir in butter and pepper, and serve at once.",
)
