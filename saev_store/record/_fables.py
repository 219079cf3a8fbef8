"""The demo's text: twelve fables of Aesop, told anew for this package, so that nothing is downloaded."""

from __future__ import annotations

#: Title -> text.
FABLES = {
    "The Fox and the Grapes": """\
On a hot afternoon a fox came to a vineyard. High on a trellis hung a cluster of grapes, dark and full. He had eaten nothing since
the morning, and his mouth watered. He took a few steps back, ran, and jumped, and missed by the length of a paw. He tried again
from the other side. He tried from a stone, and he tried from the stump of an old vine. The grapes moved a little in the wind and
stayed where they were. At last the fox sat down, licked his paws, and looked somewhere else. "I can see from here that they are
sour," he said, and he walked away with his tail in the air.""",
    "The Tortoise and the Hare": """\
A hare laughed at a tortoise because she was slow. "Let us race to the bridge," said the tortoise, "and we shall see." The fox set
the course and gave the sign. The hare was out of sight before the tortoise had taken ten steps. Halfway to the bridge he looked
back at the empty road, lay down below a tree, and said to himself that there was time for a nap. The tortoise did not stop to look
at anything. She put one foot before the other, passed the tree, and went on. When the hare woke up, the sun was low. He ran as he
had never run, but the tortoise was sitting on the bridge and watching the water.""",
    "The Crow and the Pitcher": """\
In a dry summer a crow found a pitcher with a little water at the bottom. She put her beak into it, but the neck was narrow and the
water was too far down. She pushed the pitcher with all her strength, and it did not fall. Then she saw small stones on the path.
She took one and let it drop into the pitcher, and the water rose, but so little that only a crow would have seen it. She fetched
another one, and another one. Stone by stone the water came nearer. When the sun went down it stood at the brim, and the crow drank
as much as she liked.""",
    "The Lion and the Mouse": """\
A mouse ran over the nose of a sleeping lion. The lion woke up and laid a paw on her. "Let me go," said the mouse, "and one day I
shall help you." The lion had to laugh, for what could a mouse do for him? But he was not hungry, and he lifted his paw. Some weeks
later he walked into the net of a hunter. He pulled and roared, and the ropes only became tighter. The mouse knew the voice. She
came and began to gnaw at one of the knots, then at the next one, and before the hunter was there the lion stood up and shook the
net from his back.""",
    "The Ant and the Grasshopper": """\
All summer long a grasshopper sat in the meadow and sang. An ant came by with a grain of wheat that was larger than herself. "Why do
you work on such a day?" asked the grasshopper. "Sit down and sing with me." "I am carrying food home for the winter," said the ant,
"and you would do well to do the same." The grasshopper looked over the meadow, where there was food wherever he turned, and went on
singing. Then came the frost. The grasshopper found nothing below the snow but dry stalks, while in the warm hill the ants shared
out the wheat that they had carried there, one grain at a time.""",
    "The Boy Who Cried Wolf": """\
A boy kept the sheep of his village, and the days on the hill were long. Once he ran down and shouted, "Wolf! A wolf is among the
sheep!" The people left their work and came with sticks. There was no wolf, and the boy laughed. A week later he did the same, and
they came again, and he laughed again. Then, on a grey evening, a wolf really came out of the forest. The boy ran down to the village
and shouted as loud as he could. "He is at his game," said the people, and nobody looked up. In the morning there were fewer sheep on
the hill, and no one laughed.""",
    "The North Wind and the Sun": """\
The north wind and the sun disputed which of them was the stronger. A traveller came along the road, wrapped in a cloak. "The one who
makes him take it off shall have won," said the sun. The wind began. He blew until the trees bent and the dust flew, but the harder he
blew, the more tightly the man held his cloak. At last the wind gave up. Then the sun came out from behind a cloud and shone, at first
mildly and then with all his warmth. The traveller opened the cloak, went on a little way, wiped his forehead, and laid the cloak over
his arm.""",
    "The Town Mouse and the Country Mouse": """\
A country mouse gave her cousin from the town the best that she had: barley, roots, and water from the brook. "Come with me," said the
cousin, "and I shall show you how one can live." In the evening they sat on a table in a great house, between cheese, figs and honey
cake. They had hardly begun when a door was opened, and they ran behind a cupboard with their hearts beating. They came out, and a dog
barked. They came out once more, and a cat looked into the room. "Thank you," said the country mouse, and she took her hat. "I prefer
barley that I can eat in peace." She went home the same night.""",
    "The Dog and the Bone": """\
A dog had been given a bone by the butcher, and he carried it home across a plank over a brook. When he looked down, he saw another
dog in the water, with a bone that seemed to be larger than his own. He growled, and the other dog showed his teeth as well. He wanted
that bone, too. He opened his mouth to snap at it, and his own bone fell into the water with a splash. The other dog was gone, and so
was the bone. The dog stood on the plank for a while and looked at the rings in the water, and then he went home with nothing.""",
    "The Goose with the Golden Eggs": """\
A farmer and his wife had a goose that laid an egg of gold every morning. They sold the eggs at the market, and after some months they
were no longer poor. But one egg a day seemed little to them. "Her inside must be full of gold," said the farmer. "Why should we wait
for it?" They took a knife and opened the goose, and she was like all geese: there was no gold in her at all. From that day on they
had no goose, and no egg in the morning, and they talked for many years about what they would have had if only they had waited.""",
    "The Frogs Who Wanted a King": """\
The frogs of a pond were tired of ruling themselves and asked the sky for a king. Down came a log, with such a splash that they all hid
in the mud. After a day the bravest of them swam near and touched it. After two days they sat on it. A king who does nothing, they
said, is no king, and they asked for another one. This time there came a stork. He was tall, and he walked through the pond with slow
steps, and at each step he ate a frog. Those who were left called to the sky again, but the sky was as blue and as quiet as on any
other day.""",
    "The Oak and the Reed": """\
An oak stood by a river, and a reed grew at her feet. "I pity you," said the oak. "You bow to every breeze, and even a wren is a burden
to you." "Do not be troubled," said the reed. "I bend, and so I do not break." In the night a storm came down from the hills. The oak
held out her branches against it and did not give way by an inch. The reed lay down flat on the water. The storm took a deep breath and
blew once more, and the oak fell over with all her roots. In the morning the reed stood up again, and a wren came and sat on it.""",
}


def load_fables() -> dict[str, str]:
    """The demo's twelve fables, title to text, a fresh dict: something to record a language model over without a download.

    >>> len(load_fables()), load_fables()["The Fox and the Grapes"].split(".")[0]
    (12, 'On a hot afternoon a fox came to a vineyard')
    """
    return {title: text.replace("\n", " ") for title, text in FABLES.items()}
